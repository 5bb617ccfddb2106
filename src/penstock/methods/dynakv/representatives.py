"""LayerRepresentatives: clusters' centroids come from the store layer by layer (DynaKV)."""

import contextlib
import time
from concurrent.futures import Future

import numpy as np

from penstock.core.errors import FetchError
from penstock.engine.layer_cache import LayerSetup
from penstock.methods.dynakv.index import FollowedClusters
from penstock.methods.dynakv.representative_file import RepresentativeFile, Written
from penstock.storage.file import Int64Array, Ticket


class LayerRepresentatives:
    """Brings one layer's representatives into memory that other layers use too, and back.

    Source: DynaKV, section 6.1 (pipeline 1).

    Two buffers serve all layers, even and odd ones. Layer i asks for those of layer i+1 when its
    own fetch has landed, so that they are read behind its attention and FFN and the next layer's
    projections (the paper: behind the projection of the query alone), after layer i-1, which had
    that buffer, has taken its token in. That order is the writer thread's: a buffer is taken
    over there.
    """

    def __init__(
        self, layer_idx: int, file: RepresentativeFile, followed: FollowedClusters,
        setup: LayerSetup,
    ) -> None:  # fmt: skip
        """For one layer.

        Args:
            followed: its centroids are the buffer's vectors.
        """
        assert followed.clusters.statistics.centroids is file.buffer.vectors
        self._layer_idx, self._file, self._followed, self._setup = layer_idx, file, followed, setup
        self._coming: Future[Ticket | None] | None = None
        self.reads_ahead: LayerRepresentatives | None = None
        """The next layer's."""

    @property
    def _counts(self) -> Int64Array:
        return self._followed.clusters.statistics.counts

    # Reading ----------------------------------------------------------------------------------

    def ask_ahead(self, *, followed: bool) -> None:
        """Ask for the next layer's.

        Args:
            followed: whether what this layer takes in has been handed to the writer's thread; the
                buffer of this layer is given away behind that only.
        """
        ahead = self.reads_ahead
        if ahead is not None and followed == (ahead._file.buffer is self._file.buffer):
            ahead.ask()

    def ask(self) -> None:
        """Start reading unless they are there, behind all that the writer's thread has to do."""
        if self._coming is None and self._followed.ready:
            self._coming = self._setup.writer.run(self._take_over_and_read)

    def _take_over_and_read(self) -> Ticket | None:
        buffer = self._file.buffer
        if buffer.holder is self:
            return None
        former, buffer.holder = buffer.holder, self
        if isinstance(former, LayerRepresentatives):
            former._let_land()
        return self._file.submit_read(self._counts)

    def _let_land(self) -> None:
        """Wait for reads that are no longer wanted."""
        coming, self._coming = self._coming, None
        with contextlib.suppress(FetchError):
            if coming is not None and (ticket := coming.result()) is not None:
                ticket.wait()

    def need(self) -> None:
        """Wait until they are there; they stay until the next step of another layer.

        Raises:
            FetchError: a read failed.
        """
        self.ask()
        coming, self._coming = self._coming, None
        if coming is None:
            return
        start = time.perf_counter()
        try:
            ticket = coming.result()
            if ticket is not None:
                ticket.wait()
        except BaseException:
            self._file.buffer.holder = None
            raise
        if ticket is None:
            return
        phase = self._setup.phase
        phase.stall_s += time.perf_counter() - start
        phase.reads += ticket.num_reads
        phase.read_bytes += ticket.read_bytes
        if self._setup.tracer is not None:
            self._setup.tracer.add(
                "representatives", "disk read", ticket.submitted_ns, ticket.finished_ns,
                layer=self._layer_idx, reads=ticket.num_reads, bytes=ticket.read_bytes,
            )  # fmt: skip

    # Writing ----------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Have the buffer without reading: they are about to be made anew."""

        def job() -> None:
            former, self._file.buffer.holder = self._file.buffer.holder, self
            if isinstance(former, LayerRepresentatives):
                former._let_land()

        self._let_land()
        self._setup.writer.run(job).result()

    def write_all(self) -> None:
        """Write those that were made anew.

        Raises:
            StorageError: a write failed.
        """
        written = self._file.write_all(self._counts)
        self._setup.phase.writes += written.writes
        self._setup.phase.written_bytes += written.num_bytes

    def write(self, changed: set[tuple[int, int]]) -> Written:
        """Write those that a step has changed, while the buffer is still this layer's.

        Args:
            changed: row and cluster of each.

        Raises:
            StorageError: a write failed.
        """
        assert self._file.buffer.holder is self, "another layer has the buffer"
        capacity = self._file.buffer.vectors.shape[1]
        numbers = sorted(row * capacity + cluster for row, cluster in changed)
        return self._file.write(np.array(numbers, dtype=np.int64))
