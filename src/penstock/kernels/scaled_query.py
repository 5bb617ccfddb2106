"""scaled_down(): a query whose products with keys are numbers of its dtype."""

import torch
from torch import Tensor

_SHARE = 2.0**-6


def scaled_down(query: Tensor) -> tuple[Tensor, float]:
    """A query for products that are rounded to its dtype, and what gives them back in float32.

    float16 ends at 65,504. Where keys have large biases, products before the scaling go beyond it,
    though attention, which scales float32, is well. Division by a power of two leaves the digits
    of all but the smallest numbers. Other dtypes hold any product: their query is given back
    itself, with 1.
    """
    if query.dtype != torch.float16:
        return query, 1.0
    return query * _SHARE, 1.0 / _SHARE
