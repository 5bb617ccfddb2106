"""Clusters in a file behave like a dict of lists of entries, in every layout."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.core.errors import FetchError, StorageError, StoreFullError
from penstock.methods.dynakv.cluster_file import ClusterFile
from penstock.methods.dynakv.cluster_pools import EMPTY
from penstock.methods.dynakv.cluster_reads import LayoutCounters
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray
from penstock.storage.store import KVStore
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.integrity import check_pools
from penstock.testing.late_file import LateFile

LAYOUTS = [TokenOrder, PackedClusters, PooledClusters]


def numbered(first: int, count: int, entry_bytes: int) -> ByteArray:
    """Entries that all differ: uint8 [count, entry_bytes]."""
    stamps = np.arange(first, first + count, dtype=np.uint32)[:, None]
    return ((stamps * 2654435761 >> (np.arange(entry_bytes) % 4 * 8)) + stamps).astype(np.uint8)


def pooled(
    *sizes: int, sector_bytes: int = 512, num_buffers: int = 0, gap_bytes: int = 0, spare: int = 0
) -> tuple[PooledClusters, FaultyFile, ByteArray]:
    """Clusters 0, 1, ... of consecutive tokens, pools as if one had `spare` entries more."""
    file = FaultyFile(LateFile())
    layout = PooledClusters(
        file, 512, sector_bytes=sector_bytes, num_buffers=num_buffers, gap_bytes=gap_bytes
    )
    tokens = numbered(0, sum(sizes) + spare, 512)
    bounds = np.cumsum([0, *sizes])
    members = {i: np.arange(a, b) for i, (a, b) in enumerate(pairwise(bounds.tolist()))}
    order = list(range(len(sizes)))
    if spare:
        members[99] = np.arange(bounds[-1], bounds[-1] + spare)
        order += [EMPTY] * (len(order) % 2) + [99]
    layout.place(order, members, tokens)
    if spare:
        layout.free(99)
    layout.counters = LayoutCounters()
    return layout, file, tokens


def test_an_append_of_nothing_changes_nothing() -> None:
    layout, _, tokens = pooled(8, 4)
    layout.append(1, tokens[:0])
    assert layout.num_entries(1) == 4
    assert layout.counters == LayoutCounters()


def test_neighbours_are_read_in_one_access() -> None:
    layout, _, tokens = pooled(8, 8, 8, 8, 8)
    found = layout.read([2, 1])
    assert (found[0] == tokens[16:24]).all()
    assert (found[1] == tokens[8:16]).all()
    assert layout.counters.access_lengths == {16: 1}
    layout.read([0, 3])
    assert layout.counters.access_lengths == {16: 1, 8: 2}
    assert layout.counters.read_bytes == 32 * 512
    assert layout.counters.read_entries == 32
    layout.read([0, 1, 2, 3])
    assert layout.counters.access_lengths == {16: 1, 8: 2, 32: 1}, "full pools have no gap"


def test_a_gap_is_read_through_where_it_pays() -> None:
    for gap_bytes, lengths, gap in [(4096, {12: 1}, 4096), (4095, {8: 1, 4: 1}, 0)]:
        layout, _, _ = pooled(8, 4, spare=10, gap_bytes=gap_bytes)
        assert layout.pools.room(0) == 8
        layout.read([0, 1])
        assert layout.counters.access_lengths == lengths
        assert layout.counters.gap_bytes == gap
        assert layout.counters.read_bytes == 12 * 512 + gap


def test_a_buffered_cluster_writes_whole_sectors_only() -> None:
    """Fig. 8's page-aligned buffer: write amplification 1, against one sector per entry."""
    written = {}
    for num_buffers in (0, 1):
        layout, _, _ = pooled(8, sector_bytes=4096, num_buffers=num_buffers, spare=40)
        for i in range(32):
            layout.append(0, numbered(1000 + i, 1, 512))
        assert (layout.read([0])[0][8:] == numbered(1000, 32, 512)).all()
        written[num_buffers] = layout.counters.written_bytes
        assert layout.counters.appended_bytes == 32 * 512
        assert layout.counters.reread_bytes == (0 if num_buffers else 28 * 4096)
    assert written == {0: 32 * 4096, 1: 32 * 512}


def test_entries_in_a_buffer_are_not_read_from_the_file() -> None:
    layout, _, _ = pooled(8, sector_bytes=4096, num_buffers=1, spare=20)
    layout.append(0, numbered(1000, 3, 512))
    assert layout.counters.num_writes == 0
    assert len(layout.read([0])[0]) == 11
    assert layout.counters.access_lengths == {8: 1}
    assert layout.counters.read_bytes == 4096
    layout.flush()
    assert layout.counters.written_bytes == 4096
    layout.append(0, numbered(1003, 1, 512))
    assert (layout.read([0])[0][8:] == numbered(1000, 4, 512)).all()


def test_a_split_keeps_the_buffer_and_a_free_gives_it_back() -> None:
    layout, _, _ = pooled(8, 1, sector_bytes=4096, num_buffers=1, spare=20)
    layout.append(0, numbered(1000, 4, 512))
    layout.split(0, 2, np.arange(12) != 9)
    assert layout.counters.written_bytes == 4096, "the child; what stays is changed in memory"
    assert 0 in layout._buffers
    for _ in range(20):
        layout.append(0, numbered(0, 1, 512))
    layout.free(0)
    layout.append(1, numbered(0, 1, 512))
    assert 1 in layout._buffers
    layout.place([0], {0: np.arange(1)}, numbered(0, 1, 512))
    layout.append(1, numbered(0, 1, 512))
    layout.append(0, numbered(0, 1, 512))
    assert 1 in layout._buffers, "the new cluster has none of the old one's heat"


@pytest.mark.parametrize("cluster", [0, 1])
def test_what_is_only_in_buffers_costs_no_access(cluster: int) -> None:
    layout, _, _ = pooled(0, 0, sector_bytes=4096, num_buffers=2, spare=20, gap_bytes=1 << 20)
    layout.append(0, numbered(1000, 3, 512))
    layout.append(1, numbered(1010, 3, 512))
    assert (layout.read([1, 0])[1] == numbered(1000, 3, 512)).all()
    assert layout.counters == LayoutCounters(appended_bytes=6 * 512)
    layout.append(cluster, numbered(1003 + 10 * cluster, 8, 512))
    assert (layout.read([cluster])[0] == numbered(1000 + 10 * cluster, 11, 512)).all()
    assert layout.counters.access_lengths == {8: 1}
    assert layout.counters.read_bytes == 4096, "its second sector is in memory"


def test_a_read_under_way_does_not_see_later_changes() -> None:
    layout, _, tokens = pooled(8, 8, sector_bytes=4096, num_buffers=1, spare=20)
    layout.append(0, numbered(1000, 2, 512))
    read = layout.submit_read([0, 1])
    layout.append(0, numbered(1002, 7, 512))
    layout.split(0, 5, np.arange(17) % 2 == 0)
    layout.free(1)
    layout.place([7], {7: np.arange(20)}, numbered(5000, 20, 512))
    found = read.split()
    assert (found[0] == np.concatenate([tokens[:8], numbered(1000, 2, 512)])).all()
    assert (found[1] == tokens[8:16]).all()


def test_a_gap_between_clusters_in_memory_is_not_counted() -> None:
    layout, _, _ = pooled(0, 0, 0, 8, sector_bytes=4096, num_buffers=2, spare=20, gap_bytes=16384)
    layout.append(0, numbered(1000, 3, 512))
    layout.append(1, numbered(1010, 3, 512))
    layout.read([0, 1, 3])
    assert layout.counters.access_lengths == {8: 1}
    assert layout.counters.read_bytes == 4096
    assert layout.counters.gap_bytes == 0


def test_whoever_overwrites_waits_for_the_reads_under_way() -> None:
    layout, _, tokens = pooled(8, 8)
    read = layout.submit_read([1])
    layout.free(1)
    layout.append(0, numbered(1000, 8, 512))
    assert (read.gather() == tokens[8:]).all(), "freed, and its place taken"
    layout, _, tokens = pooled(8, 6)
    read = layout.submit_read([1])
    layout.append(0, numbered(1000, 4, 512))
    assert (read.gather() == tokens[8:]).all(), "moved, and its place taken"
    layout, _, tokens = pooled(8, 6)
    read = layout.submit_read([0])
    layout.split(0, 2, np.arange(8) > 3, tokens[:8])
    assert (read.gather() == tokens[:8]).all(), "split, and its holes closed"
    packed = PackedClusters(LateFile(), 512)
    packed.place([0, 1], {0: np.arange(2), 1: np.arange(2, 4)}, tokens[:4])
    read = packed.submit_read([1])
    packed.append(0, tokens[8:9])
    assert (read.gather() == tokens[2:4]).all(), "what follows moved"


def test_hot_clusters_get_the_buffers() -> None:
    layout, _, _ = pooled(3, 3, 3, sector_bytes=4096, num_buffers=1, spare=40)
    layout.append(0, numbered(1000, 1, 512))
    assert 0 in layout._buffers
    assert len(layout._buffers.rows) == 1
    layout.append(0, numbered(1001, 1, 512))
    layout.append(1, numbered(1100, 1, 512))
    assert 1 not in layout._buffers, "colder than 0"
    assert layout.counters.written_bytes == 4096, "a cold cluster is written at once"
    for i in range(3):
        layout.append(1, numbered(1101 + i, 1, 512))
    assert 1 in layout._buffers
    assert 0 not in layout._buffers
    assert (layout.read([0])[0][3:] == numbered(1000, 2, 512)).all(), "its buffer was written"
    assert (layout.read([1])[0][3:] == numbered(1100, 4, 512)).all()


def test_heat_decays() -> None:
    layout, _, _ = pooled(3, 3, 3, sector_bytes=4096, num_buffers=1, spare=40)
    for _ in range(20):
        layout.append(0, numbered(0, 1, 512))
    for i in range(3000):  # long enough for the worth of an append to be scaled down
        layout.append(1 + i % 2, numbered(0, 1, 512))
        if i == 20:
            assert 0 not in layout._buffers, "20 appends of long ago are worth little"
    for _ in range(30):
        layout.append(0, numbered(0, 1, 512))
    assert 0 in layout._buffers


def test_growth_beyond_a_pool_moves_the_smaller_one_and_counts_it() -> None:
    layout, _, tokens = pooled(8, 6)
    layout.append(0, numbered(1000, 2, 512))
    assert layout.counters.moved_bytes == 0, "the pool has 16 places"
    layout.append(0, numbered(1002, 1, 512))
    assert layout.counters.moved_bytes == layout.counters.reread_bytes == 6 * 512
    assert layout.counters.num_moves == 1
    assert layout.pools.partner(0) == EMPTY
    layout.append(0, numbered(1003, 6, 512))
    assert layout.counters.num_moves == 2, "now it has outgrown the whole pool"
    assert layout.counters.moved_bytes == (6 + 11) * 512
    found = layout.read([0, 1])
    assert (found[0] == np.concatenate([tokens[:8], numbered(1000, 9, 512)])).all()
    assert (found[1] == tokens[8:]).all()


def test_a_split_moves_one_child_and_closes_the_holes() -> None:
    layout, _, tokens = pooled(10, 10)
    stays = np.array([1, 0, 1, 1, 0, 1, 1, 0, 1, 1], dtype=np.bool_)
    before = layout.pools.half(0)
    kept, moved = layout.split(0, 2, stays, tokens[:10])
    assert layout.pools.half(0) == before, "one child stays in its place"
    assert kept.tolist() == [0, 8, 2, 3, 9, 5, 6]
    assert moved.tolist() == [1, 4, 7]
    assert layout.counters.moved_bytes == (3 + 2) * 512
    assert layout.counters.written_bytes == (3 + 2) * 512
    assert layout.counters.reread_bytes == 0, "it was in memory"
    found = layout.read([0, 2])
    assert (found[0] == tokens[kept]).all()
    assert (found[1] == tokens[moved]).all()


def test_a_split_rewrites_all_sectors_of_an_entry() -> None:
    layout = PooledClusters(LateFile(), 1200)
    tokens = numbered(0, 9, 1200)
    layout.place([0], {0: np.arange(9)}, tokens)
    for child, stays in ((1, np.arange(9) != 2), (2, np.arange(8) != 4)):
        before = layout.read([0])[0]
        kept, _ = layout.split(0, child, stays)
        assert (layout.read([0])[0] == before[kept]).all()


def test_a_split_takes_in_the_delayed_entries() -> None:
    layout, _, tokens = pooled(4, 4)
    entries = np.concatenate([tokens[:4], numbered(1000, 4, 512)])
    stays = np.arange(8) != 1
    kept, _ = layout.split(0, 2, stays, entries)
    assert layout.counters.appended_bytes == 4 * 512
    assert layout.num_entries(0) == 7
    assert (layout.read([0])[0] == entries[kept]).all()
    assert (layout.read([1])[0] == tokens[4:]).all(), "the partner made way"


def test_a_child_does_not_take_what_its_parent_grows_into() -> None:
    layout, _, tokens = pooled(4, 8)
    layout.free(1)
    entries = np.concatenate([tokens[:4], numbered(1000, 13, 512)])
    kept, moved = layout.split(0, 2, np.arange(17) >= 3, entries)
    found = layout.read([0, 2])
    assert (found[0] == entries[kept]).all()
    assert (found[1] == entries[moved]).all()
    check_pools(layout.pools)
    assert layout.pools.half(2).pool != layout.pools.half(0).pool, "14 and 3 are more than 16"


def test_a_failed_append_adds_nothing_and_can_be_repeated() -> None:
    new = numbered(1000, 7, 512)
    for num_buffers in (0, 1):
        layout, file, tokens = pooled(5, 5, sector_bytes=4096, num_buffers=num_buffers, spare=20)
        file.failing_writes = {file.num_writes}
        with pytest.raises(StoreFullError):
            layout.append(0, new)
        assert (layout.read([0])[0] == tokens[:5]).all()
        layout.append(0, new)
        assert (layout.read([0])[0][5:] == new).all()


def test_a_split_that_fails_at_the_child_changes_nothing() -> None:
    layout, file, tokens = pooled(6, 6)
    file.failing_writes = {file.num_writes}
    with pytest.raises(StoreFullError):
        layout.split(0, 2, np.arange(6) % 2 == 0, tokens[:6])
    assert layout.clusters() == [0, 1]
    assert layout.pools.pool_bytes == 12 * 512
    assert (layout.read([0])[0] == tokens[:6]).all()


def test_a_split_that_fails_in_place_is_loud() -> None:
    layout, file, tokens = pooled(6, 6)
    file.failing_writes = {file.num_writes + 1}
    with pytest.raises(StoreFullError):
        layout.split(0, 2, np.arange(6) % 2 == 0, tokens[:6])
    with pytest.raises(StorageError, match="lost"):
        layout.read([1, 0])
    with pytest.raises(StorageError, match="lost"):
        layout.append(0, tokens[:1])
    assert (layout.read([1])[0] == tokens[6:]).all()
    layout.free(0)
    layout.place([0], {0: np.arange(6)}, tokens[:6])


def test_a_full_disk_leaves_what_was_there() -> None:
    layout, file, tokens = pooled(6, 6)

    def full(num_bytes: int) -> None:
        raise StoreFullError("no room")

    file.inner.reserve = full  # type: ignore[method-assign]
    with pytest.raises(StoreFullError):
        layout.place([5], {5: np.arange(2000)}, numbered(0, 2000, 512))
    with pytest.raises(StoreFullError):
        layout.append(0, numbered(0, 2000, 512))
    assert layout.clusters() == [0, 1]
    assert (layout.read([0])[0] == tokens[:6]).all()
    check_pools(layout.pools)


def test_a_failed_read_is_a_fetch_error() -> None:
    layout, file, _ = pooled(6, 6)
    file.failing_reads = {file.num_reads}
    read = layout.submit_read([0])
    with pytest.raises(FetchError):
        read.split()
    layout.free(1)  # waits for that read, and does not fail by it
    file.failing_reads = {file.num_reads}
    with pytest.raises(FetchError):
        layout.split(0, 3, np.arange(6) < 2)
    assert layout.clusters() == [0]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_on_a_real_disk(kind: type[ClusterFile], tmp_path: object) -> None:
    with KVStore.create(str(tmp_path), num_layers=1, unit_bytes=512) as store:
        layout = kind(store.region(0).file, 512, num_buffers=2, gap_bytes=4096)
        rng = np.random.default_rng(0)
        tokens = numbered(0, 60, 512)
        members = {c: np.flatnonzero(np.arange(60) % 3 == c) for c in range(3)}
        layout.place(range(3), members, tokens)
        model = {c: tokens[at] for c, at in members.items()}
        buffer = AlignedBuffer(2000, 4096)
        for i in range(120):
            cluster = int(rng.integers(3))
            layout.append(cluster, numbered(100 + i, 1, 512))
            model[cluster] = np.concatenate([model[cluster], numbered(100 + i, 1, 512)])
            if i % 50 == 49:
                stays = rng.random(len(model[cluster])) < 0.5
                kept, moved = layout.split(cluster, 100 + i, stays, model[cluster])
                model[100 + i], model[cluster] = model[cluster][moved], model[cluster][kept]
            read = layout.submit_read(list(model), buffer)
            assert all((a == b).all() for a, b in zip(read.split(), model.values(), strict=True))


def test_places_are_checked() -> None:
    layout, _, tokens = pooled(4)
    with pytest.raises(AssertionError, match="has a place"):
        layout.place([0], {0: np.arange(4)}, tokens)
    with pytest.raises(AssertionError, match="partition"):
        layout.place([1], {1: np.array([0, 0])}, tokens[:2])
    with pytest.raises(AssertionError, match="nothing stays"):
        layout.split(0, 1, np.zeros(4, dtype=np.bool_))
    with pytest.raises(AssertionError, match="no such cluster"):
        layout.read([3])
