"""Other forms of the device tier's work for a while, for ablations."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from penstock.kernels.device import available
from penstock.models import fused_step
from penstock.runtime.device_tier import device_layer


@contextmanager
def without_triton() -> Iterator[None]:
    """Let every kernel run as its plain torch twin inside, as if Triton were not installed."""
    found = available._has_triton
    vars(available)["_has_triton"] = lambda: False
    try:
        yield
    finally:
        vars(available)["_has_triton"] = found


@contextmanager
def as_flagged(flags: Collection[str]) -> Iterator[None]:
    """As a method's flags say (`Method.flags`); what is none of a kernel's is left out."""
    found = device_layer.STAYING_GATHER, fused_step.ENABLED
    vars(device_layer)["STAYING_GATHER"] = "staying" in flags
    vars(fused_step)["ENABLED"] = "fused" in flags
    try:
        if "torch" in flags:
            with without_triton():
                yield
        else:
            yield
    finally:
        vars(device_layer)["STAYING_GATHER"], vars(fused_step)["ENABLED"] = found
