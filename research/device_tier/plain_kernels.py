"""Other forms of the device tier's work for a while, for ablations."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

from penstock.engine.device_tier import device_layer
from penstock.kernels.device import available
from penstock.models import fused_step


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
    layer, step = vars(device_layer), vars(fused_step)
    found = layer["STAYING_GATHER"], layer["on_link"], step["ENABLED"]
    if "filling" in flags:
        layer["STAYING_GATHER"] = False
    if "inline" in flags:
        layer["on_link"] = nullcontext
    if "parts" in flags:
        step["ENABLED"] = False
    try:
        if "torch" in flags:
            with without_triton():
                yield
        else:
            yield
    finally:
        layer["STAYING_GATHER"], layer["on_link"], step["ENABLED"] = found
