"""Settings A and B of the KVSwap paper: equal memory for each sequence, and in all."""
