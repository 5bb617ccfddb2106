"""ReadWatch: every read that a cache's files are asked for, and how long the files were busy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.models.cache_adapter import TieredCache
from penstock.storage.file import Int64Array, Ticket


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What went to the files of a cache, splits and partly filled sectors included."""

    reads: int = 0
    read_bytes: int = 0
    """Padding and whole clusters included."""
    busy_s: float = 0.0
    """Time in which at least one batch was under way, from its submission until whoever waited for
    it had it."""

    def __add__(self, other: "Reads") -> "Reads":
        return Reads(
            reads=self.reads + other.reads, read_bytes=self.read_bytes + other.read_bytes,
            busy_s=self.busy_s + other.busy_s,
        )  # fmt: skip


class ReadWatch:
    """Counts at the files themselves, so that every method's reads count alike, whoever submits
    them: fetches in one round or several, and loads for splits on the writer's thread."""

    def __init__(self, cache: TieredCache) -> None:
        """Start watching; a cache that keeps everything in memory has nothing to watch."""
        self._tickets: list[Ticket] = []
        store = cache.tiers._store
        for region in [] if store is None else store._regions:
            self._watch(region.file)

    def _watch(self, file: Any) -> None:
        submit = file.submit_reads

        def submit_reads(
            offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
        ) -> Ticket:
            ticket: Ticket = submit(offsets, lengths, addresses, keep_alive)
            self._tickets.append(ticket)
            return ticket

        file.submit_reads = submit_reads

    def take(self) -> Reads:
        """What has ended since the last call; what is under way is told by the next one."""
        tickets, self._tickets = self._tickets, []
        ended = [ticket for ticket in tickets if ticket.finished_ns]
        self._tickets += [ticket for ticket in tickets if not ticket.finished_ns]
        return Reads(
            reads=sum(ticket.num_reads for ticket in ended),
            read_bytes=sum(ticket.read_bytes for ticket in ended),
            busy_s=covered_ns([(one.submitted_ns, one.finished_ns) for one in ended]) / 1e9,
        )


def covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    """The length of a union of spans (start, end)."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
