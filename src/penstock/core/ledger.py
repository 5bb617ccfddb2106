"""MemoryLedger: the one book in which every byte of fast memory is written down."""

from dataclasses import dataclass
from types import TracebackType

from penstock.core.byte_size import enough_bytes, format_bytes
from penstock.core.errors import BudgetError


class Reservation:
    """Bytes taken from a ledger; `release` gives them back, once."""

    def __init__(self, ledger: "MemoryLedger", what: str, num_bytes: int) -> None:
        self._ledger = ledger
        self.what = what
        self.num_bytes = num_bytes
        self._open = True

    def release(self) -> None:
        """Give the bytes back. A second call does nothing."""
        if self._open:
            self._open = False
            self._ledger._give_back(self.what, self.num_bytes)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """What a cache holds in fast memory, item by item, in bytes."""

    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    full_cache_bytes: int
    """Size of the whole KV cache for the same batch and `max_tokens`."""
    items: dict[str, int]
    """Bytes per purpose: "index", "slots", "window", "staging", ..."""


class MemoryLedger:
    """Books fast memory against one limit; passing the limit is an error that names what asked."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._items: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes taken and not given back."""
        return sum(self._items.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be taken."""
        return self.limit_bytes - self.used_bytes

    def take(self, what: str, num_bytes: int) -> Reservation:
        """Take `num_bytes` for `what`.

        Raises:
            BudgetError: the limit would be passed.
        """
        assert num_bytes >= 0, num_bytes
        needed = self.used_bytes + num_bytes
        if needed > self.limit_bytes:
            raise BudgetError(
                f"{what} needs {format_bytes(num_bytes)} but only "
                f"{format_bytes(self.free_bytes)} of the {format_bytes(self.limit_bytes)} budget "
                f"is free; give memory={enough_bytes(needed)} or more",
                needed_bytes=needed,
            )
        self._items[what] = self._items.get(what, 0) + num_bytes
        self.peak_bytes = max(self.peak_bytes, needed)
        return Reservation(self, what, num_bytes)

    def move(self, source: str, target: str, num_bytes: int) -> None:
        """Bytes that were taken for one purpose serve another; move them back before `release`."""
        assert 0 <= num_bytes <= self._items.get(source, 0), (source, num_bytes)
        self._items[source] -= num_bytes
        self._items[target] = self._items.get(target, 0) + num_bytes

    def _give_back(self, what: str, num_bytes: int) -> None:
        left = self._items[what] - num_bytes
        assert left >= 0, (what, left)
        self._items[what] = left

    def report(self, full_cache_bytes: int) -> MemoryReport:
        """Itemise what is held now."""
        return MemoryReport(
            limit_bytes=self.limit_bytes,
            used_bytes=self.used_bytes,
            peak_bytes=self.peak_bytes,
            full_cache_bytes=full_cache_bytes,
            items={what: size for what, size in self._items.items() if size},
        )
