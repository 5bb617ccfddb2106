"""without_triton(): the torch twins of all kernels for a while, for ablations."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.kernels.device import available


@contextmanager
def without_triton() -> Iterator[None]:
    """Let every kernel run as its plain torch twin inside, as if Triton were not installed."""
    found = available._has_triton
    vars(available)["_has_triton"] = lambda: False
    try:
        yield
    finally:
        vars(available)["_has_triton"] = found
