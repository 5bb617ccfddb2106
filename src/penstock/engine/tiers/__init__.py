"""Fixed pools of device and host memory, and who occupies each slot."""
