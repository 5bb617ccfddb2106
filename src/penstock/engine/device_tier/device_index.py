"""DeviceIndex: ranks units in a decode step of static shapes that a CUDA graph can hold."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.slot_plan import SlotPlan


class StepClock:
    """Where the decode is, on the device: one for all layers of a cache.

    Everything that changes from step to step is in tensors whose place in memory does not change.
    """

    def __init__(self, plan: SlotPlan, device: torch.device) -> None:
        self._group_tokens = plan.group_tokens
        self.window_slots = plan.window_slots
        """Newest units, the step's own counted, that are in the window."""
        self._sink_slots = plan.sink_slots
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        """Cache position of the step's token."""
        self.unit = torch.zeros(1, dtype=torch.int64, device=device)
        """Unit of the step's token."""
        self.end_unit = torch.zeros(1, dtype=torch.int64, device=device)
        """Units from here on are in the window."""
        self.left = torch.full((1,), -1, dtype=torch.int64, device=device)
        """Position that left the window with this step, -1 for none (units of one token)."""
        self._offsets = torch.arange(plan.group_tokens, device=device)
        self.unit_places = plan.sink_slots * plan.group_tokens + self._offsets
        """Places in the window of the tokens of the step's unit. int64 [group_tokens]"""
        self.start = torch.zeros(plan.batch, dtype=torch.int32, device=device)
        """First position of each row that is not padding. [rows]"""
        self.start_unit = torch.zeros(plan.batch, dtype=torch.int32, device=device)
        """First unit of each row that is not padding. [rows]"""
        self.first_unit = torch.full(
            (plan.batch,), plan.sink_slots, dtype=torch.int32, device=device
        )
        """First unit of each row that may be selected: not padding, not a sink. [rows]"""
        self.finite: dict[int, Tensor] = {}
        """By layer, whether the keys of this pass are; looked at once, when it ends. bool []"""

    @staticmethod
    def num_bytes(rows: int) -> int:
        """Bytes of a clock, for the ledger."""
        return 12 * rows + 32

    def set_start(self, start: Tensor) -> None:
        """Say where each row begins (left padding). start: int64 [rows]."""
        self.start.copy_(start)
        self.start_unit.copy_(start // self._group_tokens)
        self.first_unit.copy_(self.start_unit + self._sink_slots)

    def tick(self) -> None:
        """Begin the step of `position`'s token: say what is in the window now."""
        torch.div(self.position, self._group_tokens, rounding_mode="floor", out=self.unit)
        self.end_unit.copy_(self.unit + 1 - self.window_slots).clamp_(min=0)
        if self._group_tokens == 1:
            self.left.copy_(self.end_unit - 1)
        slot = self._sink_slots + self.unit % self.window_slots
        torch.add(slot * self._group_tokens, self._offsets, out=self.unit_places)

    def advance(self) -> None:
        """The step is over."""
        self.position += 1


class Wanted(NamedTuple):
    """What a step selects; the same tensors at every step."""

    ids: Tensor
    """Units, distinct where `valid`. int32 [rows, wanted]"""
    valid: Tensor
    """bool [rows, wanted]"""
    due: Tensor
    """Rows whose selection is new; all others attend to what they have. bool [rows]"""


class DeviceIndex(ABC):
    """One layer's index for the device tier; see `KeyIndex` for the one that the host drives.

    `take` and `begin_decode` belong to prompts and may wait for the device; `select` and `put`
    belong to decode steps and neither wait nor allocate by what they find.
    """

    lse: Tensor | None = None
    """As in `KeyIndex`. float32 [rows, heads of a row]"""

    @property
    def ready(self) -> bool:
        """Whether `take` can be called; otherwise `fit` comes first."""
        return True

    @property
    def wanted_queries(self) -> int:
        """Newest queries of the prompt that `see_queries` wants."""
        return 0

    def see_queries(self, queries: Tensor) -> None:  # noqa: B027 - optional
        """Take them, before `fit`; arguments as in `KeyIndex.see_queries`."""

    def fit(self, sample: Tensor, positions: Tensor) -> None:  # noqa: B027 - optional
        """Learn from a sample of the prompt's own keys; arguments as in `KeyIndex.fit`."""

    @property
    def refits(self) -> bool:
        """Whether a `fit` to few tokens is made again while tokens are decoded."""
        return False

    def forget_fit(self) -> None:  # noqa: B027 - optional
        """What `fit` learnt is of another text, or of too little."""

    def see_start(self, first_unit: NDArray[np.int64]) -> None:  # noqa: B027 - optional
        """Learn where each row begins; arguments as in `KeyIndex.see_start`."""

    def see_slots(self, slot_of: Tensor) -> None:  # noqa: B027 - optional
        """Know what slots hold: the tensor changes from step to step, and stays where it is.

        Args:
            slot_of: slot of each unit, -1 for none. int32 [rows, units]
        """

    @abstractmethod
    def take(self, keys: Tensor, first_token: int) -> None:
        """Take in a prompt's keys, whole units.

        Args:
            keys: post-RoPE. [rows, tokens, kv_heads, head_dim]
            first_token: cache position of the first of them.
        """

    def begin_decode(self, length: int, clock: StepClock) -> None:  # noqa: B027 - optional
        """`length` tokens are there and the next one is decoded: make ready for steps."""

    @abstractmethod
    def select(self, query: Tensor, clock: StepClock) -> Wanted:
        """Units for this step.

        Args:
            query: the true query, post-RoPE. [rows, heads of a row, head_dim]
        """

    def kept(self) -> Wanted | None:
        """What rows attend to that do not select anew in the next step: `due` where they have
        selected before. None where every step selects."""
        return None

    @abstractmethod
    def put(self, keys: Tensor, clock: StepClock) -> None:
        """Take in the step's token: the keys of its unit as far as it goes.

        Args:
            keys: places of tokens that are still to come hold anything.
                [rows, group_tokens, kv_heads, head_dim]
        """

    def settle(self, length: int) -> None:  # noqa: B027 - optional
        """Between steps, every `SETTLE_STEPS`: tidy up what steps cannot (may wait).

        Args:
            length: tokens that are there.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""

    @abstractmethod
    def take_rows_from(self, other: "DeviceIndex", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""


SETTLE_STEPS = 32
"""Steps between two calls of `DeviceIndex.settle`."""
