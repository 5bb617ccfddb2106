"""Entries for several clusters at once are what a loop of single appends makes of them."""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.core.errors import StorageError, StoreFullError
from penstock.methods.dynakv.cluster_file import ClusterFile
from penstock.methods.dynakv.cluster_reads import LayoutCounters
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.file import ByteArray, Int64Array
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.integrity import check_pools
from penstock.testing.late_file import LateFile

LAYOUTS = [TokenOrder, PackedClusters, PooledClusters]
NUM_CLUSTERS = 9


def numbered(first: int, count: int, entry_bytes: int) -> ByteArray:
    """Entries that all differ: uint8 [count, entry_bytes]."""
    stamps = np.arange(first, first + count, dtype=np.uint32)[:, None]
    return ((stamps * 2654435761 >> (np.arange(entry_bytes) % 4 * 8)) + stamps).astype(np.uint8)


class Twin:
    """A pooled layout on a file that fails on demand, and what can be seen of both."""

    def __init__(self, sizes: tuple[int, int], num_buffers: int, counts: list[int]) -> None:
        self.inner = LateFile()
        self.file = FaultyFile(self.inner)
        self.layout = PooledClusters(
            self.file, sizes[0], sector_bytes=sizes[1], num_buffers=num_buffers, headroom=1.5
        )
        bounds = np.cumsum([0, *counts])
        members = {c: np.arange(bounds[c], bounds[c + 1]) for c in range(len(counts))}
        self.layout.place(range(len(counts)), members, numbered(0, int(bounds[-1]), sizes[0]))

    def attempt(self, clusters: Int64Array, entries: ByteArray, *, at_once: bool) -> str:
        """Append; the class of the error, or nothing."""
        try:
            if at_once:
                self.layout.append_each(clusters, entries)
            else:
                for i, cluster in enumerate(clusters.tolist()):
                    self.layout.append(cluster, entries[i : i + 1])
        except StorageError as error:
            return type(error).__name__
        finally:
            self.file.failing_writes = ()
        return ""

    def state(self) -> tuple[object, ...]:
        """Bytes, places, buffers, traffic and counters."""
        layout = self.layout
        buffered = [c for c in range(NUM_CLUSTERS) if c in layout._buffers]
        places = [layout.pools.half(c) for c in range(NUM_CLUSTERS)]
        counters, layout.counters = layout.counters, LayoutCounters()
        num_reads = len(self.inner.reads)
        entries = [bytes(e) for e in layout.read(range(NUM_CLUSTERS))]
        del self.inner.reads[num_reads:]
        layout.counters = counters
        return entries, places, buffered, self.inner.writes, self.inner.reads, counters


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    sizes=st.sampled_from([(512, 512), (512, 4096), (256, 4096), (1000, 512), (100, 1024)]),
    num_buffers=st.sampled_from([0, 2, 9]),
    counts=st.lists(st.integers(0, 12), min_size=NUM_CLUSTERS, max_size=NUM_CLUSTERS),
)
def test_the_same_as_a_loop(
    data: st.DataObject, sizes: tuple[int, int], num_buffers: int, counts: list[int]
) -> None:
    one, other = Twin(sizes, num_buffers, counts), Twin(sizes, num_buffers, counts)
    stamp = 1000
    for _ in range(data.draw(st.integers(1, 15))):
        chosen = data.draw(
            st.lists(st.integers(0, NUM_CLUSTERS - 1), min_size=1, max_size=8, unique=True)
        )
        clusters = np.array(chosen, dtype=np.int64)
        fails = data.draw(st.sampled_from([None, None, None, 0, 1, 3]))
        entries = numbered(stamp, len(chosen), sizes[0])
        stamp += len(chosen)
        results = []
        for twin, at_once in ((one, True), (other, False)):
            if fails is not None:
                twin.file.failing_writes = {twin.file.num_writes + fails}
            results.append(twin.attempt(clusters, entries, at_once=at_once))
        assert results[0] == results[1]
        event(f"failed: {bool(results[0])}")
        assert one.state() == other.state()
        if data.draw(st.booleans()):
            one.layout.flush()
            other.layout.flush()
    check_pools(one.layout.pools)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_whoever_comes_before_a_failure_is_in(kind: type[ClusterFile]) -> None:
    file = FaultyFile(LateFile())
    layout = kind(file, 512)
    if kind is PooledClusters:
        layout = PooledClusters(file, 512, headroom=2.0)
    tokens = numbered(0, 12, 512)
    layout.place([0, 1, 2], {c: np.arange(4 * c, 4 * c + 4) for c in range(3)}, tokens)
    file.failing_writes = {file.num_writes + 2}
    with pytest.raises(StoreFullError):
        layout.append_each(np.array([0, 2, 1]), numbered(100, 3, 512))
    assert [layout.num_entries(c) for c in range(3)] == [5, 4, 5]
    assert (layout.read([0])[0][4:] == numbered(100, 1, 512)).all()
    assert layout.counters.appended_bytes == 2 * 512


def test_a_spoiled_cluster_stops_it() -> None:
    file = FaultyFile(LateFile())
    layout = PooledClusters(file, 512, sector_bytes=4096, num_buffers=4, headroom=2.0)
    tokens = numbered(0, 24, 512)
    layout.place([0, 1], {c: np.arange(12 * c, 12 * c + 12) for c in range(2)}, tokens)
    layout.append_each(np.array([0, 1]), numbered(50, 2, 512))
    file.failing_writes = {file.num_writes + 1}
    with pytest.raises(StoreFullError):
        layout.split(0, 5, np.arange(13) > 2)
    assert 0 in layout._buffers
    with pytest.raises(StorageError, match="lost"):
        layout.append_each(np.array([1, 0]), numbered(100, 2, 512))
    assert (layout.read([1])[0][13:] == numbered(100, 1, 512)).all()


def test_entries_may_be_a_view_of_something_wider() -> None:
    layout = PooledClusters(LateFile(), 512, sector_bytes=4096, num_buffers=1, headroom=4.0)
    tokens, wide = numbered(0, 8, 512), numbered(100, 12, 1024)
    layout.place([0, 1], {c: np.arange(4 * c, 4 * c + 4) for c in range(2)}, tokens)
    for step in range(6):
        layout.append_each(np.array([1, 0]), wide[2 * step : 2 * step + 2, 256:768])
    found = layout.read([1, 0])
    assert (found[0][4:] == wide[0::2, 256:768]).all()
    assert (found[1][4:] == wide[1::2, 256:768]).all()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_arguments_are_checked(kind: type[ClusterFile]) -> None:
    layout = kind(LateFile(), 512)
    layout.place([0, 1], {0: np.arange(4), 1: np.arange(4, 8)}, numbered(0, 8, 512))
    with pytest.raises(AssertionError, match="two entries"):
        layout.append_each(np.array([1, 1]), numbered(0, 2, 512))
    with pytest.raises(AssertionError):
        layout.append_each(np.array([0, 1]), numbered(0, 1, 512))
    layout.append_each(np.zeros(0, dtype=np.int64), numbered(0, 0, 512))
    assert layout.counters.appended_bytes == 0


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_cleared_layout_is_a_new_one_on_the_same_file(kind: type[ClusterFile]) -> None:
    inner = LateFile()
    file = FaultyFile(inner)
    layout = kind(file, 512, sector_bytes=4096, num_buffers=1)
    tokens = numbered(0, 40, 512)
    layout.place([3, 7], {3: np.arange(20), 7: np.arange(20, 40)}, tokens)
    for i in range(20):
        layout.append(3, numbered(100 + i, 1, 512))
    file.failing_writes = {file.num_writes + (kind is PooledClusters)}
    if kind is not TokenOrder:  # where a split writes nothing
        with pytest.raises(StoreFullError):
            layout.split(3, 9, np.arange(40) % 2 == 0)
        with pytest.raises(StorageError, match="lost"):
            layout.read([3])
    file.failing_writes = ()
    read, present = layout.submit_read([7]), inner.present
    layout.clear()
    assert layout.clusters() == []
    assert layout.used_bytes == layout.end_bytes == 0
    assert inner.present == present, "the file keeps its length"
    layout.place([7, 3], {7: np.arange(5), 3: np.arange(5, 10)}, numbered(900, 10, 512))
    assert (read.gather() == tokens[20:]).all(), "what was under way has ended before"
    assert (layout.read([7])[0] == numbered(900, 5, 512)).all()
    layout.append(3, numbered(950, 1, 512))
    assert (layout.read([3])[0][5:] == numbered(950, 1, 512)).all()
    if isinstance(layout, PooledClusters):
        assert 3 in layout._buffers, "the old heat of 3 is forgotten, and its buffer free"
        layout.append(7, numbered(960, 1, 512))
        layout.append(7, numbered(961, 1, 512))
        assert 7 in layout._buffers, "hotter than 3, were the old appends counted it were not"
        check_pools(layout.pools)
