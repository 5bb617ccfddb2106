"""Tensor functions with several implementations, and the choice between them."""
