"""The KV of many beams as one tree of blocks in two tiers, and who is in fast memory when."""
