"""The device tier: KV in pinned host memory, slots on the GPU, steps that never wait."""
