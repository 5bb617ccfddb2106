"""CacheHealth: whether what a cache holds can still be trusted, and the refusal where it cannot."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from penstock.core.errors import CacheStateError, FetchError, StorageError
from penstock.core.on_device import on_device


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
        self._entered: list[AbstractContextManager[object]] = []
        self.is_closed = self.is_torn = self.lost_writes = False

    @property
    def is_sound(self) -> bool:
        """Whether steps may go on."""
        return not (self.is_closed or self.is_torn or self.lost_writes)

    def require_sound(self, *, agrees: bool) -> None:
        """Refuse to go on where that would answer from garbage.

        Args:
            agrees: whether all layers hold the same tokens.

        Raises:
            CacheStateError: closed, or an earlier step failed.
        """
        if self.is_closed:
            raise CacheStateError("the cache is closed")
        if self.lost_writes:
            raise CacheStateError(
                "tokens of this cache could not be written to its store and are lost; reset() it"
            )
        if self.is_torn or not agrees:
            raise CacheStateError(
                "an earlier step failed halfway, so that layers hold different tokens; crop() the "
                "cache to a length before it, or reset() it"
            )

    def __enter__(self) -> None:
        """Remember whatever is raised inside."""
        entered = on_device(self._device)
        entered.__enter__()
        self._entered.append(entered)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.is_torn = True
                lost = isinstance(error, StorageError) and not isinstance(error, FetchError)
                self.lost_writes = self.lost_writes or lost
                self._forget_slots()
        finally:
            self._entered.pop().__exit__(None, None, None)

    def heal(self) -> None:
        """All tokens were forgotten."""
        self.is_torn = self.lost_writes = False
