"""Kernels of the device tier: Triton on CUDA, a plain torch twin with the same signature anywhere.

Every call has static shapes, writes in place into tensors that it is given and never waits for the
host, so that a whole decode step can be captured in a CUDA graph.
"""
