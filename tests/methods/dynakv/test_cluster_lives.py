"""Random lives of clusters in a file, in every layout, against a dict of lists of entries."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import StorageError, StoreFullError
from penstock.methods.dynakv.cluster_file import ClusterFile
from penstock.methods.dynakv.cluster_pools import EMPTY
from penstock.methods.dynakv.cluster_reads import ClusterRead, LayoutCounters
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.file import ByteArray
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.integrity import check_pools
from penstock.testing.late_file import LateFile


def numbered(first: int, count: int, entry_bytes: int) -> ByteArray:
    """Entries that all differ: uint8 [count, entry_bytes]."""
    stamps = np.arange(first, first + count, dtype=np.uint32)[:, None]
    return ((stamps * 2654435761 >> (np.arange(entry_bytes) % 4 * 8)) + stamps).astype(np.uint8)


class ClustersMachine(RuleBasedStateMachine):
    """Placements, appends, splits, frees, flushes, reads under way, and writes that fail."""

    steps = 0

    @initialize(
        layout=st.sampled_from([TokenOrder, PackedClusters, PooledClusters, PooledClusters]),
        sizes=st.sampled_from([(512, 512), (512, 4096), (100, 512), (1000, 512), (512, 1536)]),
        num_buffers=st.sampled_from([0, 1, 3]),
        gap_bytes=st.sampled_from([0, 1024, 1 << 20]),
    )
    def make(
        self, layout: type[ClusterFile], sizes: tuple[int, int], num_buffers: int, gap_bytes: int
    ) -> None:
        self.inner = LateFile()
        self.file = FaultyFile(self.inner)
        self.size, self.sector = sizes
        self.layout = layout(
            self.file, self.size, sector_bytes=self.sector, num_buffers=num_buffers,
            gap_bytes=gap_bytes,
        )  # fmt: skip
        self.model: dict[int, list[bytes]] = {}
        self.lost: set[int] = set()
        self.stamp = self.next = self.placed = self.appended = 0
        self.pending: list[tuple[ClusterRead, list[list[bytes]]]] = []

    def entries(self, count: int) -> ByteArray:
        self.stamp += count
        return numbered(self.stamp - count, count, self.size)

    def pick(self, data: st.DataObject) -> int | None:
        alive = sorted(self.model.keys() - self.lost)
        return data.draw(st.sampled_from(alive)) if alive else None

    def guarded(self, fails: int | None, action: Callable[[], object]) -> bool:
        """Do it, perhaps with a write that fails; returns whether it raised."""
        if fails is not None:
            self.file.failing_writes = {self.file.num_writes + fails}
        try:
            action()
        except StorageError as error:
            if self.lost or (fails is not None and isinstance(error, StoreFullError)):
                return True
            raise
        finally:
            self.file.failing_writes = ()
        return False

    @rule(
        counts=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=6),
        fails=st.sampled_from([None, None, None, 0, 1]), seed=st.integers(0, 99),
    )  # fmt: skip
    def place(self, counts: list[int | None], fails: int | None, seed: int) -> None:
        order = [EMPTY if n is None else self.next + i for i, n in enumerate(counts)]
        self.next += len(counts)
        total = sum(n for n in counts if n is not None)
        rows = np.random.default_rng(seed).permutation(total)
        members, begin = {}, 0
        for cluster, count in zip(order, counts, strict=True):
            if count is not None:
                members[cluster] = np.sort(rows[begin : begin + count])
                begin += count
        entries = self.entries(total)
        if not self.guarded(fails, lambda: self.layout.place(order, members, entries)):
            self.placed += entries.size
            self.model |= {c: [bytes(entries[i]) for i in at] for c, at in members.items()}

    @rule(data=st.data(), count=st.integers(0, 12), fails=st.sampled_from([None, None, None, 0, 1]))
    def append(self, data: st.DataObject, count: int, fails: int | None) -> None:
        if (cluster := self.pick(data)) is None:
            return
        entries = self.entries(count)
        if self.guarded(fails, lambda: self.layout.append(cluster, entries)):
            self.find_lost(kept=cluster)
        else:
            self.appended += entries.size
            self.model[cluster] += [bytes(entry) for entry in entries]

    @rule(data=st.data(), times=st.integers(1, 10))
    def append_one_by_one(self, data: st.DataObject, times: int) -> None:
        if (cluster := self.pick(data)) is None:
            return
        for _ in range(times):
            entry = self.entries(1)
            if self.guarded(None, partial(self.layout.append, cluster, entry)):
                return
            self.appended += entry.size
            self.model[cluster].append(bytes(entry))

    @rule(data=st.data(), fails=st.sampled_from([None, None, None, 0, 1]))
    def append_each(self, data: st.DataObject, fails: int | None) -> None:
        alive = sorted(self.model.keys() - self.lost)
        chosen = data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
        entries, before = self.entries(len(chosen)), self.layout.counters.appended_bytes
        failed = self.guarded(
            fails, lambda: self.layout.append_each(np.array(chosen, dtype=np.int64), entries)
        )
        taken = (self.layout.counters.appended_bytes - before) // self.size
        assert (taken < len(chosen)) if failed else (taken == len(chosen))
        for cluster, entry in zip(chosen[:taken], entries[:taken], strict=True):
            self.model[cluster].append(bytes(entry))
        self.appended += taken * self.size
        if failed:
            self.find_lost(kept=chosen[taken])

    @rule(
        data=st.data(), more=st.sampled_from([0, 0, 1, 7]), given_them=st.booleans(),
        fails=st.sampled_from([None, None, None, 0, 1, 2]),
    )  # fmt: skip
    def split(self, data: st.DataObject, more: int, given_them: bool, fails: int | None) -> None:
        cluster = self.pick(data)
        if cluster is None or len(self.model[cluster]) + more < 2:
            return
        count = len(self.model[cluster])
        all_of_them = self.model[cluster] + [bytes(e) for e in self.entries(more)]
        known = len(all_of_them) if given_them else count
        if known < 2:
            return
        stays = data.draw(st.lists(st.booleans(), min_size=known, max_size=known))
        stays[data.draw(st.integers(0, known - 1))] ^= len(set(stays)) == 1
        child, self.next = self.next, self.next + 1
        array = np.frombuffer(b"".join(all_of_them), np.uint8).reshape(-1, self.size)
        given_entries = array if given_them else None
        found = []
        if self.guarded(
            fails,
            lambda: found.append(self.layout.split(cluster, child, np.array(stays), given_entries)),
        ):
            assert child not in self.layout.clusters()
            self.find_lost()
            return
        kept, moved = found[0]
        assert sorted(kept.tolist()) == np.flatnonzero(stays).tolist()
        assert sorted([*kept.tolist(), *moved.tolist()]) == list(range(known))
        self.model[cluster] = [all_of_them[i] for i in kept]
        self.model[child] = [all_of_them[i] for i in moved]
        self.appended += (known - count) * self.size

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.model:
            cluster = data.draw(st.sampled_from(sorted(self.model)))
            self.layout.free(cluster)
            self.lost.discard(cluster)
            del self.model[cluster]

    @rule(often=st.integers(0, 9))
    def clear(self, often: int) -> None:
        if often:
            return
        self.layout.clear()
        self.model.clear()
        self.lost.clear()
        assert self.layout.end_bytes == 0

    @rule(fails=st.sampled_from([None, None, 0]))
    def flush(self, fails: int | None) -> None:
        self.guarded(fails, self.layout.flush)

    @rule(data=st.data())
    def start_read(self, data: st.DataObject) -> None:
        alive = sorted(self.model.keys() - self.lost)
        wanted = data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else []
        before = LayoutCounters(), len(self.inner.reads)
        self.layout.counters, counters = before[0], self.layout.counters
        read = self.layout.submit_read(wanted)
        now, self.layout.counters = self.layout.counters, counters
        reads = self.inner.reads[before[1] :]
        assert now.read_bytes == sum(length for _, length in reads)
        assert sum(now.access_lengths.values()) == len(reads)
        for (a, length), (b, _) in pairwise(reads):
            assert a + length < b, "neighbours are read as one, and nothing twice"
        lengths = sum(length * times for length, times in now.access_lengths.items())
        assert now.read_entries == lengths <= sum(len(self.model[c]) for c in wanted)
        assert now.gap_bytes <= now.read_bytes
        self.pending.append((read, [list(self.model[c]) for c in wanted]))

    @rule()
    def finish_reads(self) -> None:
        for read, expected in reversed(self.pending):
            found = read.split()
            assert [[bytes(e) for e in entries] for entries in found] == expected
        self.pending.clear()

    def find_lost(self, kept: int | None = None) -> None:
        """Clusters that a failed write spoiled say so; where nothing had begun, none has."""
        for cluster in self.model:
            try:
                self.layout.read([cluster])
            except StorageError:
                self.lost.add(cluster)
        if isinstance(self.layout, TokenOrder) or (
            kept is not None and isinstance(self.layout, PooledClusters)
        ):
            assert not self.lost - self.lost_before(), "an append spoils nothing"

    def lost_before(self) -> set[int]:
        return getattr(self, "known_lost", set())

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "layout"):
            return
        type(self).steps += 1
        self.known_lost = set(self.lost)
        layout, counters = self.layout, self.layout.counters
        assert layout.clusters() == sorted(self.model)
        assert layout.used_bytes == sum(map(len, self.model.values())) * self.size
        assert layout.end_bytes <= self.inner.present
        assert layout.end_bytes % self.sector == 0
        assert counters.placed_bytes == self.placed
        assert counters.appended_bytes == self.appended
        assert counters.written_bytes == sum(length for _, length in self.inner.writes)
        assert counters.num_writes == len(self.inner.writes)
        assert not any(at % self.sector or n % self.sector for at, n in self.inner.writes)
        if isinstance(layout, PooledClusters):
            check_pools(layout.pools)
        alive = sorted(self.model.keys() - self.lost)
        self.layout.counters = LayoutCounters()
        found = layout.read(alive)
        self.layout.counters = counters
        for cluster, entries in zip(alive, found, strict=True):
            assert [bytes(e) for e in entries] == self.model[cluster], cluster
        if len(self.pending) > 3:
            self.finish_reads()

    def teardown(self) -> None:
        if hasattr(self, "pending"):
            self.finish_reads()


def test_random_lives() -> None:
    ClustersMachine.steps = 0
    run_state_machine_as_test(
        ClustersMachine,
        settings=settings(max_examples=70, stateful_step_count=50, deadline=None),
    )
    assert ClustersMachine.steps >= 2_500
