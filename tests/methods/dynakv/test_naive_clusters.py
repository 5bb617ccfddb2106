"""The layouts that DynaKV is compared with: what moves, and how long accesses are."""

import numpy as np
import pytest

from penstock.core.errors import StorageError, StoreFullError
from penstock.methods.dynakv.cluster_pools import EMPTY
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.file import ByteArray
from penstock.storage.memory_file import MemoryFile
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.late_file import LateFile

LAYOUTS = [TokenOrder, PackedClusters, PooledClusters]


def numbered(first: int, count: int, entry_bytes: int) -> ByteArray:
    """Entries that all differ: uint8 [count, entry_bytes]."""
    stamps = np.arange(first, first + count, dtype=np.uint32)[:, None]
    return ((stamps * 2654435761 >> (np.arange(entry_bytes) % 4 * 8)) + stamps).astype(np.uint8)


def test_an_append_in_the_middle_moves_what_follows() -> None:
    """DynaKV, Fig. 13: the naive layout moves bytes where pools move none."""
    tokens = numbered(0, 400, 512)
    members = {c: np.arange(100 * c + (c > 0) * 9, 100 * c + 109) for c in range(4)}
    members[3] = members[3][:91]
    moved = {}
    for kind in LAYOUTS:
        layout = kind(MemoryFile(), 512)
        layout.place(range(4), members, tokens)
        layout.append(1, numbered(1000, 1, 512))
        layout.append(3, numbered(1001, 1, 512))
        moved[kind] = layout.counters.moved_bytes
        found = layout.read(range(4))
        assert (found[1] == np.concatenate([tokens[109:209], numbered(1000, 1, 512)])).all()
        assert (found[2] == tokens[209:309]).all()
    assert moved == {TokenOrder: 0, PackedClusters: 191 * 512, PooledClusters: 0}


def test_access_lengths_of_the_layouts() -> None:
    """DynaKV, Fig. 12: runs of tokens, whole clusters, and correlated clusters together."""
    tokens = numbered(0, 64, 512)
    members = {c: np.flatnonzero(np.arange(64) // 2 % 4 == c) for c in range(4)}
    lengths = {}
    for kind, order in [
        (TokenOrder, [0, 1, 2, 3]), (PackedClusters, [0, 1, 2, 3]),
        (PooledClusters, [0, 1, 3, 2]), (PooledClusters, [EMPTY, 1, 2, 0, 3]),
    ]:  # fmt: skip
        layout = kind(MemoryFile(), 512)
        layout.place(order, members, tokens)
        layout.free(0)
        found = layout.read([2, 1])
        assert (found[0] == tokens[members[2]]).all()
        lengths[kind, order[0]] = layout.counters.access_lengths
    # Of the tokens 2, 3, 4, 5, 10, ... those of one cluster are two and of both are four.
    assert lengths[TokenOrder, 0] == {4: 8}
    assert lengths[PackedClusters, 0] == {32: 1}
    assert lengths[PooledClusters, 0] == {16: 2}
    assert lengths[PooledClusters, EMPTY] == {32: 1}


def test_a_failed_move_in_the_packed_layout_is_loud() -> None:
    file = FaultyFile(LateFile())
    layout = PackedClusters(file, 512)
    layout.place([0, 1], {0: np.arange(2), 1: np.arange(2, 4)}, numbered(0, 4, 512))
    file.failing_writes = {1}
    with pytest.raises(StoreFullError):
        layout.append(0, numbered(9, 1, 512))
    assert (layout.read([0])[0] == numbered(0, 2, 512)).all()
    with pytest.raises(StorageError, match="lost"):
        layout.read([1])


def test_a_failed_split_in_the_packed_layout_spoils_that_cluster_alone() -> None:
    file = FaultyFile(LateFile())
    layout = PackedClusters(file, 512)
    layout.place([0, 1], {0: np.arange(3), 1: np.arange(3, 5)}, numbered(0, 5, 512))
    file.failing_writes = {1}
    with pytest.raises(StoreFullError):
        layout.split(0, 2, np.array([True, False, True]))
    assert (layout.read([1])[0] == numbered(3, 2, 512)).all()
    with pytest.raises(StorageError, match="lost"):
        layout.read([0])


def test_a_split_in_the_packed_layout_moves_inside_the_cluster() -> None:
    layout = PackedClusters(LateFile(), 512)
    layout.place([0, 1], {0: np.arange(4), 1: np.arange(4, 6)}, numbered(0, 6, 512))
    layout.split(0, 2, np.array([True, False, True, True]))
    assert layout.counters.moved_bytes == 3 * 512, "all but the first of four"
    assert (layout.read([2])[0] == numbered(1, 1, 512)).all()
