"""Workspace: device memory that the past streams through, one for all layers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.kernels.device.slots import gather_range


class Workspace:
    """Two blocks: one is copied into on a stream of its own while the other is attended to."""

    def __init__(self, plan: SlotPlan, shape: KVShape, device: torch.device) -> None:
        self._shape = shape
        self._units, self._device = plan.stream_units, device
        size = (2, plan.batch, self._units, plan.unit_bytes)
        self._blocks = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream: torch.cuda.Stream | None = None
        self._landed: list[torch.cuda.Event] = []
        """Of each half; so are those behind which it may be overwritten."""
        self._free: list[torch.cuda.Event] = []
        if device.type == "cuda":
            made: Any = torch.cuda
            self._stream = made.Stream(device)
            self._landed, self._free = [made.Event(), made.Event()], [made.Event(), made.Event()]

    def stream(self, host: Tensor, end_unit: int) -> Iterator[tuple[int, int, Tensor]]:
        """All units before `end_unit`, block by block.

        Args:
            host: uint8 [rows, units, unit_bytes]

        Yields:
            First and end unit of a block, and its tokens on the device, good until the next one is
            asked for. [rows, tokens, 2, kv_heads, head_dim]
        """
        ranges = [
            (first, min(first + self._units, end_unit)) for first in range(0, end_unit, self._units)
        ]
        current: Any = None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)  # what wrote the host's bytes was queued before
        if ranges:
            self._fetch(host, ranges[0], 0)
        for i, (first, end) in enumerate(ranges):
            half, next_half = i % 2, (i + 1) % 2
            if i + 1 < len(ranges):
                if self._stream is not None and i > 0:
                    self._stream.wait_event(self._free[next_half])
                self._fetch(host, ranges[i + 1], next_half)
            if current is not None:
                current.wait_event(self._landed[half])
            shape = self._shape
            tokens = self._blocks[half][:, : end - first].view(shape.dtype)
            yield (
                first, end,
                tokens.reshape(len(tokens), -1, 2, shape.num_kv_heads, shape.head_dim),
            )  # fmt: skip
            if current is not None:
                self._free[half].record(current)

    def _fetch(self, host: Tensor, units: tuple[int, int], half: int) -> None:
        first, end = units
        if self._stream is None:
            gather_range(host, self._blocks[half], first, end - first)
            return
        with torch.cuda.stream(self._stream):
            gather_range(host, self._blocks[half], first, end - first)
            self._landed[half].record(self._stream)
