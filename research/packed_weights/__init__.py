"""Weights in 8 and 4 bits beside plain ones: speed, memory while loading, loss."""
