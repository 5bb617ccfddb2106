"""CacheHealth: whether what a cache holds can still be trusted, and the refusal where it cannot."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from penstock.core.errors import CacheStateError, ConfigError, FetchError, StorageError
from penstock.core.on_device import on_device


class OtherLayer(Protocol):
    """A layer of the same model whose keys and values are not in tiers (a sliding window)."""

    def get_seq_length(self) -> int:
        """Tokens taken in."""

    def can_remove(self, count: int) -> bool:
        """Whether the newest `count` tokens can be taken back."""


class CacheHealth:
    """Closed, halfway through a step that failed, or without tokens that could not be written.

    What may fail runs inside it: on the cache's device, and remembered where it does.
    """

    def __init__(self, device: torch.device, forget_slots: Callable[[], None]) -> None:
        """A healthy cache.

        Args:
            device: where it computes.
            forget_slots: called after a failure: nothing that it may have left in the slots or on
                the disk is trusted.
        """
        self._forget_slots, self._device = forget_slots, device
        self._entered: list[tuple[AbstractContextManager[object], int]] = []
        self._keeps = 0
        self.is_closed = self.lost_writes = False
        self.sound_length: int | None = None
        """Tokens that a step which failed has left as they were; None where none failed."""
        self.others: Sequence[OtherLayer] = ()
        """The model's layers that are not in tiers."""

    @property
    def is_torn(self) -> bool:
        """Whether a step failed, and nothing was cropped to a length before it since."""
        return self.sound_length is not None

    @property
    def is_sound(self) -> bool:
        """Whether steps may go on."""
        return not (self.is_closed or self.is_torn or self.lost_writes)

    def require_sound(self, tiers: Sequence[int], others: Sequence[OtherLayer] = ()) -> None:
        """Refuse to go on where that would answer from garbage.

        Args:
            tiers: tokens that each tiered layer holds.
            others: layers that have to hold as many; none where the step has passed some.

        Raises:
            CacheStateError: closed, or an earlier step failed.
        """
        if self.is_closed:
            raise CacheStateError("the cache is closed")
        if self.lost_writes:
            raise CacheStateError(
                "tokens of this cache could not be written to its store and are lost; reset() it"
            )
        lengths = [*tiers, *(layer.get_seq_length() for layer in others)]
        if not self.is_torn and len(set(lengths)) < 2:
            return
        raise CacheStateError(
            "an earlier step failed halfway, so that layers hold different tokens; "
            + self._advice(tiers)
        )

    def _advice(self, tiers: Sequence[int]) -> str:
        length = self.common_length(tiers)
        if length == 0:
            return "reset() the cache"
        if not all(each.can_remove(each.get_seq_length() - length) for each in self.others):
            return "sliding windows cannot go back that far, so reset() the cache"
        return f"crop({length}) the cache, which is its length before it, or reset() it"

    def common_length(self, tiers: Sequence[int]) -> int:
        """Tokens that every layer holds and that can be trusted.

        Args:
            tiers: tokens that each tiered layer holds.
        """
        lengths = [*tiers, *(layer.get_seq_length() for layer in self.others)]
        if self.sound_length is not None:
            lengths.append(self.sound_length)
        return min(lengths, default=0)

    def keeping(self, length: int) -> "CacheHealth":
        """For `with`: what fails inside leaves the first `length` tokens of all layers alone."""
        self._keeps = length
        return self

    def __enter__(self) -> None:
        """Remember whatever is raised inside."""
        entered = on_device(self._device)
        entered.__enter__()
        self._entered.append((entered, self._keeps))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        entered, keeps = self._entered.pop()
        try:
            if error is not None:
                if not isinstance(error, ConfigError):  # refused before anything happened
                    self.tear(keeps)
                lost = isinstance(error, StorageError) and not isinstance(error, FetchError)
                self.lost_writes = self.lost_writes or lost
                self._forget_slots()
        finally:
            entered.__exit__(None, None, None)

    def tear(self, keeps: int) -> None:
        """Something failed that leaves the first `keeps` tokens alone."""
        known = self.sound_length
        self.sound_length = keeps if known is None else min(known, keeps)

    def cropped(self, length: int) -> None:
        """All layers hold `length` tokens now."""
        if self.sound_length is not None and length <= self.sound_length:
            self.sound_length = None

    def heal(self) -> None:
        """All tokens were forgotten."""
        self.sound_length, self.lost_writes = None, False
