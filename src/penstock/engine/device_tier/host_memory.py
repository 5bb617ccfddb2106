"""HostMemory: the whole KV of one layer in (pinned) host memory, row by row."""

import math

import torch
from torch import Tensor

from penstock.core.errors import StoreFullError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.kernels.device.host_view import host_view
from penstock.storage.pinned_memory import pinned_memory


class HostMemory:
    """All tokens of one layer, as units and as tokens of the same bytes.

    On CUDA the memory is pinned and kernels read and write it in place.
    """

    def __init__(self, plan: SlotPlan, shape: KVShape, device: torch.device) -> None:
        """Take the memory for `plan.host_units` units of every row.

        Raises:
            StoreFullError: there is not so much host memory.
        """
        size = (plan.batch, plan.host_units, plan.unit_bytes)
        try:
            if device.type == "cuda":
                self.units: Tensor = pinned_memory(math.prod(size)).view(size)
            else:
                self.units = torch.empty(size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:  # torch names no better one
            raise StoreFullError(
                f"no host memory for {plan.batch} rows of {plan.host_units} units of "
                f"{plan.unit_bytes} bytes; take a smaller batch or fewer tokens, or a store on "
                "disk"
            ) from error
        self.tokens: Tensor = self.units.view(shape.dtype).view(
            plan.batch, -1, 2, shape.num_kv_heads, shape.head_dim
        )
        """[rows, units * group_tokens, 2, kv_heads, head_dim]"""
        self.tokens_there: Tensor = host_view(self.tokens, device)
        """The tokens as operations of the device see them, in the order of its stream."""
