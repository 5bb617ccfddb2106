"""Workspace: device memory that the past streams through, one for all layers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.sizing import stream_block_units
from penstock.kernels.device.slots import gather_range


class Workspace:
    """Two blocks: one is copied into on a stream of its own while the other is attended to."""

    def __init__(self, plan: SlotPlan, shape: KVShape, device: torch.device) -> None:
        self._shape = shape
        self._units = stream_block_units(
            plan.batch, plan.unit_bytes, plan.group_tokens, plan.max_units
        )
        size = (2, plan.batch, self._units, plan.unit_bytes)
        self._blocks = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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
        free: list[torch.cuda.Event | None] = [None, None]
        landed = self._fetch(host, ranges[0], 0, None) if ranges else None
        for i, (first, end) in enumerate(ranges):
            if landed is not None:
                torch.cuda.current_stream().wait_event(landed)
            half = i % 2
            if i + 1 < len(ranges):
                landed = self._fetch(host, ranges[i + 1], 1 - half, free[1 - half])
            shape = self._shape
            tokens = self._blocks[half][:, : end - first].view(shape.dtype)
            yield (
                first, end,
                tokens.reshape(len(tokens), -1, 2, shape.num_kv_heads, shape.head_dim),
            )  # fmt: skip
            if self._stream is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream())
                free[half] = event

    def _fetch(
        self, host: Tensor, units: tuple[int, int], half: int, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        first, end = units
        if self._stream is None:
            gather_range(host, self._blocks[half], first, end - first)
            return None
        # What wrote the host's bytes was queued before.
        self._stream.wait_stream(torch.cuda.current_stream())
        if free is not None:
            self._stream.wait_event(free)
        with torch.cuda.stream(self._stream):
            gather_range(host, self._blocks[half], first, end - first)
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record(self._stream)
        return landed
