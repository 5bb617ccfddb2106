"""add_shares(): scores from the logits of every head; without torch."""

import numpy as np

from penstock.kernels.key_rounding import FloatArray
from penstock.kernels.native.compiled import address, kernel

LARGEST_EXPONENT = 80.0
"""Logits further above their normaliser than this count as so far above."""
LEAST_EXPONENT = -87.0
"""Logits further below their normaliser than this count nothing."""


def add_shares(
    logits: FloatArray, normalisers: FloatArray, out: FloatArray, threads: int = 1
) -> None:
    """Over the heads the sum of exp(logit - normaliser); the twin of `add_shares_twin`.

    Args:
        logits: [q_heads, n], contiguous
        normalisers: [q_heads], contiguous
        out: filled. float32 [n], contiguous
        threads: at least 1.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    heads, count = logits.shape
    wanted = ((logits, (heads, count)), (normalisers, (heads,)), (out, (count,)))
    for array, shape in wanted:
        if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(f"{array.dtype} {array.shape} instead of float32 {shape}")
    compiled = kernel("logit_sums")
    if compiled is None:
        add_shares_twin(logits, normalisers, out)
        return
    compiled(address(logits), 1, heads, count, address(normalisers), address(out), max(1, threads))


def add_shares_twin(logits: FloatArray, normalisers: FloatArray, out: FloatArray) -> None:
    """The meaning of `add_shares` in numpy."""
    gaps = logits - normalisers[:, None]
    shares = np.exp(np.clip(gaps, LEAST_EXPONENT, LARGEST_EXPONENT))
    out[:] = np.where(gaps < LEAST_EXPONENT, np.float32(0.0), shares).sum(axis=0)
