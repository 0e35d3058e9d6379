"""KV memory of one rank: its layout, its pages and who holds them, its prefix index. Knows no fabric and no model."""
