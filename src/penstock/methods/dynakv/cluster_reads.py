"""ClusterRead and LayoutCounters: clusters on their way from a file, and what they cost."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.methods.dynakv.cluster_spans import Patches, sectors_of
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray, Int64Array, Ticket

_PIECE = 1024
"""Entries copied at once by `scatter`: what is on its way stays in the processor's cache."""


@dataclass(slots=True)
class LayoutCounters:
    """What a layout has cost since it was made, or since the counters were set to new ones."""

    placed_bytes: int = 0
    """Entries put by `place`, padding excluded."""
    appended_bytes: int = 0
    """Entries that came one by one, or with a split."""
    moved_bytes: int = 0
    """Entries that were stored already and got another place, padding excluded."""
    num_moves: int = 0
    """Clusters that outgrew their place, or made way."""
    num_splits: int = 0
    written_bytes: int = 0
    """Handed to the file, padding and parts of sectors written again included."""
    num_writes: int = 0
    reread_bytes: int = 0
    """Read because something had to be written: parts of sectors, clusters that move."""
    read_bytes: int = 0
    """Read for retrieval, padding and gaps included."""
    read_entries: int = 0
    """Entries asked for that came from the file; those in write buffers are not counted."""
    gap_bytes: int = 0
    """Of `read_bytes`, the gaps between clusters that were read as one."""
    access_lengths: dict[int, int] = field(default_factory=dict)
    """Accesses by the number of asked-for entries in each (DynaKV, Fig. 12)."""


class ClusterRead:
    """The entries of some clusters, on their way into a buffer or there.

    Attributes:
        counts: entries of each cluster asked for. int64 [clusters]
        offsets: byte of the buffer at which each entry begins, cluster by cluster in the order
            asked for, in a cluster in its own order. int64 [entries]
    """

    def __init__(
        self, buffer: AlignedBuffer, ticket: Ticket | None, counts: Int64Array,
        offsets: Int64Array, entry_bytes: int, patches: Patches | None,
    ) -> None:  # fmt: skip
        """Take over a submitted batch.

        Args:
            ticket: None where all entries were in memory.
            patches: what goes into the buffer when the reads have ended.
        """
        self.buffer = buffer
        self.counts = counts
        self.offsets = offsets
        self._ticket = ticket
        self._entry_bytes = entry_bytes
        self._patches = patches

    @property
    def ticket(self) -> Ticket | None:
        """The batch of reads; None where all entries were in memory."""
        return self._ticket

    def done(self) -> bool:
        """Whether every read has ended, well or not. Never blocks."""
        return self._ticket is None or self._ticket.done()

    def wait(self) -> None:
        """Block until the entries are in the buffer; a second call answers the same at once.

        Raises:
            FetchError: a read failed or came up short.
        """
        if self._ticket is not None:
            self._ticket.wait()
        if self._patches is not None:
            to, data = self._patches
            sectors_of(self.buffer, data.itemsize)[to] = data
            self._patches = None

    def gather(self) -> ByteArray:
        """Wait, and copy all entries: uint8 [entries, entry_bytes].

        Raises:
            FetchError: as `wait`.
        """
        self.wait()
        if not len(self.offsets):
            return np.zeros((0, self._entry_bytes), dtype=np.uint8)
        return self._entries()[self.offsets].view(np.uint8).reshape(-1, self._entry_bytes)

    def scatter(self, which: Int64Array, target: ByteArray, rows: Int64Array) -> None:
        """Wait, and copy entry `which[i]` to `target[rows[i]]`.

        Args:
            which: entries by their place in `offsets`. int64 [chosen]
            target: contiguous. uint8 [rows, entry_bytes]
            rows: int64 [chosen], no two the same.

        Raises:
            FetchError: as `wait`.
        """
        self.wait()
        if not len(which):
            return
        assert target.flags.c_contiguous, "each row must be one run of bytes"
        kind = f"V{self._entry_bytes}"
        sources, targets = self._entries(), target.view(kind).reshape(-1)
        offsets = self.offsets[which]
        for first in range(0, len(offsets), _PIECE):
            piece = slice(first, first + _PIECE)
            targets[rows[piece]] = sources[offsets[piece]]

    def _entries(self) -> npt.NDArray[np.void]:
        """What begins at each byte of the buffer, were it an entry."""
        num_rows = max(0, self.buffer.num_bytes - self._entry_bytes + 1)
        return np.ndarray(
            (num_rows,), dtype=f"V{self._entry_bytes}", buffer=self.buffer.array, strides=(1,)
        )

    def split(self) -> list[ByteArray]:
        """Wait, and copy each cluster's entries: a list of uint8 [count, entry_bytes].

        Raises:
            FetchError: as `wait`.
        """
        return np.split(self.gather(), self.counts.cumsum())[:-1]
