"""The engine: which tokens of which requests run in the next step, and what comes of it. Knows no fabric, no peers."""
