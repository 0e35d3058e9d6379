"""The OpenAI-compatible front: text to token ids and back, leases, routing. Loads neither torch nor native code."""
