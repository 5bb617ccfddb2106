"""ClusterLayer: a layer whose tokens are retrieved by clusters that follow the output (DynaKV)."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.closing import close_all
from penstock.core.errors import FetchError
from penstock.core.selection import Selection
from penstock.engine.attention_call import AttentionCall, require_finite
from penstock.engine.fetch_plan import FetchPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer import Layer
from penstock.engine.layer_cache import LayerSetup
from penstock.engine.policy import SelectionPolicy
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.slot_transfer import PendingRead, PoolMemory
from penstock.methods.dynakv.cluster_reads import ClusterRead
from penstock.methods.dynakv.follower import ClusterFollower, Followed
from penstock.methods.dynakv.index import FollowedClusters
from penstock.methods.dynakv.layout import ClusterFetch, ClusterLayout, Wanted
from penstock.methods.dynakv.replacement import ClusterAligned, SlotContents
from penstock.methods.dynakv.representatives import LayerRepresentatives
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray, Int64Array


class ClusterBuffers:
    """Memory that clusters land in where there is no staging; the layers share it."""

    def __init__(self, num_bytes: int, sector_bytes: int) -> None:
        """Allocate.

        Args:
            num_bytes: of each of the two.
        """
        rows = max(1, num_bytes // sector_bytes)
        self._buffers = [AlignedBuffer(rows, sector_bytes) for _ in range(2)]

    def of(self, ahead: int) -> AlignedBuffer:
        """The buffer for this step, 0, or for what is prefetched, 1."""
        return self._buffers[ahead]


class ClusterLayer(RetrievalLayer):
    """A `RetrievalLayer` whose index follows the output, and whose missing tokens are read by
    cluster where there is a layout.

    A step takes its token into the clusters, and splits what is due, on the writer's thread behind
    the attention, from the slots that the step retrieved; the next step of this layer waits for it.

    Source: DynaKV, sections 4.2 (splits take part in the retrieval) and 6.2.

    Differences: the window's tokens are in clusters too, but are attended to from the window. After
    rows were reordered (beams) the layout is given up, and what is missing is read token by token,
    until another prompt is clustered; after tokens were forgotten (crop) all is clustered anew.
    """

    may_fuse: ClassVar[bool] = False

    def __init__(
        self, layer_idx: int, setup: LayerSetup, pool_memory: PoolMemory, policy: SelectionPolicy,
        index: KeyIndex, layout: ClusterLayout | None, buffers: ClusterBuffers | None,
        representatives: LayerRepresentatives | None = None,
    ) -> None:  # fmt: skip
        """Make the layer.

        Args:
            representatives: brings those of the index where they are not in memory of its own.
        """
        super().__init__(layer_idx, setup, pool_memory, policy, index, None)
        assert isinstance(index.unwrapped, FollowedClusters)
        self.followed = index.unwrapped
        """The index, without what a benchmark may have laid over it."""
        self._layout, self._buffers = layout, buffers
        self.representatives = representatives
        self._prefetched: PendingRead | None = None
        self.following_layer: ClusterLayer | None = None
        """Whose slots are filled while this layer attends (`DynaKV.virtual`)."""
        self.former_layer: ClusterLayer | None = None
        """Who had these slots before, in the same step or the one before it."""
        self._new: int | None = None
        self._following: Future[Followed] | None = None
        self.follower = ClusterFollower(
            index, layout, representatives, setup=setup, pool=self.pool, window=self.window,
            transfer=self.transfer,
        )  # fmt: skip

    # A step -----------------------------------------------------------------------------------

    @override
    def begin(self, query: Tensor) -> None:
        self._settle()
        if self.former_layer is not None:
            self.former_layer._settle()
        if self.representatives is not None:
            self.representatives.need()
        super().begin(query)

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        self._settle()
        out = super().attend(call)
        if self._new is not None and self.index.ready:
            self._follow(self._new)
        self._new = None
        if self.representatives is not None:
            self.representatives.ask_ahead(followed=True)
        return out

    def _follow(self, position: int) -> None:
        """Let the clusters take in this step's token, behind what comes next where that is safe."""

        def job() -> Followed:
            return self.follower.follow(position, self.table, self.length)

        if self.setup.plan.shared_pools and self.following_layer is None:
            # Another layer takes the slots next, so that none could go on meanwhile.
            self._count(job())
        else:
            self._following = self.setup.writer.run(job)

    @override
    def on_closed(self, keys: Tensor, first_unit: int) -> None:
        """Units are single tokens. More than one are another prompt:
        all is clustered anew when the next step wants it."""
        require_finite(keys, self.layer_idx)
        if not self.index.ready:
            return
        if keys.shape[1] > 1 or self._new is not None:
            self._begin_anew()
            return
        self._new = first_unit

    def _settle(self) -> None:
        """Wait until the clusters have taken in the last step.

        Raises:
            StorageError: something could not be written or read.
        """
        following, self._following = self._following, None
        if following is not None:
            self._count(following.result())

    def _count(self, done: Followed) -> None:
        phase = self.setup.stats.decode
        phase.count("follow_s", done.seconds)
        phase.count("adapt_s", done.adapt_s)
        phase.writes += done.writes
        phase.written_bytes += done.written_bytes
        phase.read_bytes += done.read_bytes

    def _begin_anew(self) -> None:
        self._new = None
        self._give_up_layout()
        self.followed.forget()

    def _give_up_layout(self) -> None:
        if self._layout is not None:
            self._layout.live = False

    # The virtual cache ------------------------------------------------------------------------

    @property
    @override
    def has_prefetched(self) -> bool:
        return self._prefetched is not None

    @override
    def slots_landed(self) -> None:
        """The next layer's slots are filled, and what its
        clusters are ranked by comes."""
        if self.representatives is not None:
            self.representatives.ask_ahead(followed=False)
        if self.following_layer is not None:
            self.following_layer.prefetch()

    def prefetch(self) -> None:
        """Start to bring back what this layer's slots held when it was here last.

        Source: DynaKV, section 6.1 (pipeline 2: swapped in behind the layer before).

        Differences: nothing is swapped out, since every token is on the disk already.
        """
        layout = self._layout
        if layout is None or not layout.live or self._prefetched is not None:
            return
        self._settle()
        if self.former_layer is not None:
            self.former_layer._settle()
        rows, slots = (self.table.unit_in >= 0).nonzero()
        if not len(rows):
            return
        units = self.table.unit_in[rows, slots].astype(np.int64)
        self._prefetched = self._submit(rows, units, slots, ahead=1)

    @override
    def _finish_fetch(self) -> tuple[Selection, FetchPlan] | None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            self._land(prefetched)
        return super()._finish_fetch()

    @override
    def drop_fetch(self) -> None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched.drop()
            self._clear_table()
        super().drop_fetch()

    # Reading ----------------------------------------------------------------------------------

    @override
    def update_replacement(self) -> None:
        """Say which clusters the slots hold, before some are chosen for eviction."""
        if isinstance(self.replacement, ClusterAligned):
            clusters = self.followed.clusters
            self.replacement.observe(
                SlotContents(
                    self.table.unit_in, clusters.entries.cluster_of, self.followed.base,
                    clusters.entry_counts(), self.follower.updated_at, self.length,
                )
            )  # fmt: skip

    @override
    def read_missing(self, plan: FetchPlan) -> PendingRead:
        if self._layout is None or not self._layout.live:
            return super().read_missing(plan)
        return self._submit(plan.rows, plan.units, plan.slots)

    def _submit(
        self, rows: Int64Array, units: Int64Array, slots: Int64Array, *, ahead: int = 0
    ) -> PendingRead:
        """Start reading tokens by cluster.

        Args:
            ahead: 1 for what the next step of this layer will find there.
        """
        layout = self._layout
        assert layout is not None
        targets = rows * self.pool.slots_per_row + slots
        wanted = Wanted(rows, units - self.followed.base, targets)
        buffer, release = self._read_buffer(ahead)
        try:
            fetch = layout.submit(wanted, buffer)
        except BaseException:
            release()
            raise
        pending = PendingRead(
            fetch.tickets, self.setup.tracer, unstage=lambda: self._take_over(pending, fetch),
            release=release,
        )  # fmt: skip
        return pending

    def _take_over(self, pending: PendingRead, fetch: ClusterFetch) -> None:
        """Copy what has landed, and count the rounds that were submitted behind the first."""
        fetch.land(self._put)
        pending.read_bytes += fetch.later_bytes
        pending.num_reads += fetch.later_reads
        pending.stall_s += fetch.later_wait_s

    def _read_buffer(self, ahead: int) -> tuple[AlignedBuffer, Callable[[], None]]:
        """Memory that clusters land in, and what gives it back."""
        staging = self.setup.staging
        if staging is None:
            assert self._buffers is not None
            return self._buffers.of(ahead), lambda: None
        section = staging.acquire()
        return section.buffer, lambda: staging.release(section)

    def _put(self, read: ClusterRead | ByteArray, which: Int64Array, targets: Int64Array) -> None:
        """Copy entries into the pool."""
        memory = self.pool.memory
        if isinstance(read, ClusterRead) and memory.device.type == "cpu":
            read.scatter(which, memory.numpy(), targets)
            return
        entries = read.gather() if isinstance(read, ClusterRead) else read
        source = torch.from_numpy(entries[which]).to(memory.device)
        memory.index_copy_(0, torch.from_numpy(targets).to(memory.device), source)

    # The prompt -------------------------------------------------------------------------------

    @override
    def ensure_index(self) -> bool:
        """Clusters every row, and lays it out."""
        base, end = self._lowest_unit, self.length
        if end <= base:
            return False
        start = time.perf_counter_ns()
        self.drain()
        self.forget_slots()
        self._fit.hand_queries(self.followed)
        self.followed.begin_fit(base, end - base)
        layout, representatives = self._layout, self.representatives
        if layout is not None:
            layout.clear()
        if representatives is not None:
            representatives.take_over()
        rows = self.setup.plan.batch
        for row in range(rows):
            self.setup.indexing.report(self.layer_idx, row / rows)
            entries = self._row_entries(row, base, end)
            self.followed.fit_row(row, self.follower.keys_of(entries))
            if layout is not None:
                budget = self.setup.plan.selected_units
                layout.place_row(row, entries, budget, self.followed.scaling)
        self.followed.end_fit()
        self.index.fitted(end)
        if representatives is not None:
            representatives.write_all()
        if layout is not None:
            layout.live = True
        self.follower.begin()
        if self.setup.tracer is not None:
            now = time.perf_counter_ns()
            self.setup.tracer.add("cluster the prompt", "select", start, now, layer=self.layer_idx)
        return True

    def _row_entries(self, row: int, first: int, end: int) -> ByteArray:
        """All tokens of a row, through its slots. uint8 [tokens, entry_bytes]"""
        out = np.empty((end - first, self.setup.shape.token_bytes), dtype=np.uint8)
        most = min(self.setup.plan.num_slots, self.transfer.max_units or end)
        for start in range(first, end, most):
            stop = min(end, start + most)
            slots = row * self.pool.slots_per_row + np.arange(stop - start)
            units = self.setup.units.table[row, start:stop]
            self._land(self.transfer.read(units, slots))
            part = self.pool.memory[int(slots[0]) : int(slots[-1]) + 1]
            out[start - first : stop - first] = part.cpu().numpy()
        return out

    # Changes of shape -------------------------------------------------------------------------

    @override
    def crop(self, length: int) -> None:
        with contextlib.suppress(FetchError):  # of clusters that are made anew
            self._settle()
        super().crop(length)
        if self.index.ready:
            self._begin_anew()

    @override
    def drain(self) -> None:
        self._settle()
        super().drain()

    @override
    def forget_slots(self) -> None:
        """What follows the last step still needs them."""
        following = self._following
        if following is not None:
            wait([following])  # settling raises what it raised
        super().forget_slots()

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        assert isinstance(other, ClusterLayer)
        other._settle()
        self._settle()
        if other.representatives is not None:
            other.representatives.need()
        if self.representatives is not None and other is not self:
            self.representatives.take_over()
        super().take_rows_from(other, rows)
        if self.representatives is not None and self.index.ready:
            self.representatives.write_all()
        self._give_up_layout()
        self.follower.begin()

    @override
    def reset(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            wait([following])
        super().reset()
        self._begin_anew()

    @override
    def close(self) -> None:
        following = [] if self._following is None else [self._following]
        close_all(partial(wait, following), super().close)
