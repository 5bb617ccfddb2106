"""uses_triton(): whether a kernel of the device tier runs as Triton or as its torch twin."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def uses_triton(tensor: Tensor) -> bool:
    """Whether the Triton form of a kernel can take this tensor: on CUDA, with Triton installed."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
