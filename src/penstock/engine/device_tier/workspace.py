"""Workspace: device memory that the past streams through, one for all layers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.device_tier.host_memory import HostMemory
from penstock.kernels.device.slots import gather_range

LENDING_TOKENS = 64
"""Passes of fewer new tokens, such as those that check drafts, leave what slots hold."""


class Workspace:
    """Two blocks: one is copied into on a stream of its own while the other is attended to.

    A prompt selects nothing, so that the slots of all layers lend it their memory: blocks are as
    large as half of it then, and each takes the launches of a small one. What the slots held is
    fetched anew by the steps behind the prompt.

    Attributes:
        times_lent: passes of layers that had the slots' memory; a layer whose slots were lent since
            it last looked has nothing in them
    """

    def __init__(self, plan: SlotPlan, shape: KVShape, slots: Tensor) -> None:
        """Allocate the blocks that are no slots' memory.

        Args:
            shape: of a row.
            slots: the memory of all pools. uint8 [bytes]
        """
        self._shape, self._plan, self._slots = shape, plan, slots
        self._device = device = slots.device
        own = torch.empty(2 * self._num_bytes(plan.stream_units), dtype=torch.uint8, device=device)
        self._own = self._halves(own)
        most = plan.max_units
        self._lent = self._halves(slots[: 2 * self._num_bytes(most)])
        self.times_lent = 0
        self._is_lent = False
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        self._landed: list[torch.cuda.Event] = []
        """Of each half; so are those behind which it may be overwritten."""
        self._free: list[torch.cuda.Event] = []
        if device.type == "cuda":
            made: Any = torch.cuda
            self._stream = made.Stream(device)
            self._landed, self._free = [made.Event(), made.Event()], [made.Event(), made.Event()]

    def _num_bytes(self, units: int) -> int:
        return self._plan.batch * units * self._plan.unit_bytes

    def _halves(self, memory: Tensor) -> Tensor:
        """Two blocks of as many units as fit. uint8 [2, rows, units, unit_bytes]"""
        plan = self._plan
        units = len(memory) // self._num_bytes(1) // 2
        return memory[: 2 * self._num_bytes(units)].view(2, plan.batch, units, plan.unit_bytes)

    def lend(self, new_tokens: int, end_unit: int) -> None:
        """A layer's pass of so many tokens begins; its past has units up to `end_unit`."""
        small = self._own.shape[2]
        if new_tokens < LENDING_TOKENS or end_unit <= small or self._lent.shape[2] <= small:
            return
        if not self._is_lent and self._stream is not None:  # steps have used the slots
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_lent = True
        self.times_lent += 1

    def give_back(self) -> None:
        """The slots are theirs again, behind what was queued."""
        if self._is_lent and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._is_lent = False

    def stream(
        self, host: HostMemory, end_unit: int, written: torch.cuda.Event | None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """All units before `end_unit`, block by block; the copy of the first is queued now.

        Args:
            written: behind which the host has them; None where there is no CUDA.

        Returns:
            First and end unit of a block, and its tokens on the device, good until the next one is
            asked for. [rows, tokens, 2, kv_heads, head_dim]
        """
        blocks = self._lent if self._is_lent else self._own
        size = blocks.shape[2]
        ranges = [(first, min(first + size, end_unit)) for first in range(0, end_unit, size)]
        if ranges:
            if self._stream is not None and written is not None:
                self._stream.wait_event(written)
            self._fetch(host, blocks, ranges[0], self._turn)
        return self._blocks(host, blocks, ranges)

    def _blocks(
        self, host: HostMemory, blocks: Tensor, ranges: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int, Tensor]]:
        shape, current = self._shape, None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
        for i, (first, end) in enumerate(ranges):
            half = self._turn
            self._turn = 1 - half
            if i + 1 < len(ranges):
                self._fetch(host, blocks, ranges[i + 1], self._turn)
            if current is not None:
                current.wait_event(self._landed[half])
            tokens = blocks[half][:, : end - first].view(shape.dtype)
            yield (
                first, end,
                tokens.reshape(len(tokens), -1, 2, shape.num_kv_heads, shape.head_dim),
            )  # fmt: skip
            if current is not None:
                self._free[half].record(current)

    def _fetch(self, host: HostMemory, blocks: Tensor, units: tuple[int, int], half: int) -> None:
        first, end = units
        if self._stream is None:
            gather_range(host.units, blocks[half], first, end - first)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[half])
            gather_range(host.units, blocks[half], first, end - first)
            self._landed[half].record(self._stream)
