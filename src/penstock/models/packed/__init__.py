"""Models whose weights are kept in 8 or 4 bits, for a CPU."""
