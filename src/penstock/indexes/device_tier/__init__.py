"""Indexes whose state and decisions stay on the device: no decode step waits for the host."""
