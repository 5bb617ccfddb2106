"""on_device(): whatever GPU is current, for a while it is this one."""

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one; does nothing for other devices.

    torch follows its tensors, Triton does not: it launches on the current GPU, and so do streams
    and graphs that are asked for without saying where. A caller whose model is on another GPU need
    not know.
    """
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING
