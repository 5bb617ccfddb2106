"""Chosen entries of a read go to chosen rows."""

import numpy as np
import pytest

from penstock.core.errors import FetchError
from penstock.methods.dynakv.cluster_file import ClusterFile
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.file import ByteArray
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.late_file import LateFile


def numbered(first: int, count: int, entry_bytes: int) -> ByteArray:
    """Entries that all differ: uint8 [count, entry_bytes]."""
    stamps = np.arange(first, first + count, dtype=np.uint32)[:, None]
    return ((stamps * 2654435761 >> (np.arange(entry_bytes) % 4 * 8)) + stamps).astype(np.uint8)


def placed(kind: type[ClusterFile], size: int, count: int) -> tuple[ClusterFile, FaultyFile]:
    """Three clusters of alternating tokens, one of them in part in a write buffer."""
    file = FaultyFile(LateFile())
    layout = kind(file, size, num_buffers=1, sector_bytes=4096)
    members = {c: np.flatnonzero(np.arange(count) % 3 == c) for c in range(3)}
    layout.place([0, 1, 2], members, numbered(0, count, size))
    layout.append(1, numbered(count, 1, size))
    return layout, file


@pytest.mark.parametrize("kind", [TokenOrder, PackedClusters, PooledClusters])
@pytest.mark.parametrize(("size", "count"), [(512, 30), (100, 700), (256, 900)])
def test_chosen_entries_go_to_chosen_rows(kind: type[ClusterFile], size: int, count: int) -> None:
    layout, _ = placed(kind, size, count)
    rng = np.random.default_rng(0)
    read = layout.submit_read([2, 1])
    num_read = int(read.counts.sum())
    for num_chosen in (num_read // 2, num_read, 0, 1):
        which = rng.permutation(num_read)[:num_chosen]
        target = np.full((num_read + 9, size), 0xEE, dtype=np.uint8)
        rows = rng.permutation(num_read + 9)[:num_chosen]
        read.scatter(which, target, rows)
        expected = np.full_like(target, 0xEE)
        expected[rows] = read.gather()[which]
        assert (target == expected).all()


def test_an_entry_may_be_wanted_twice() -> None:
    layout, _ = placed(PooledClusters, 512, 30)
    target = np.zeros((3, 512), dtype=np.uint8)
    layout.submit_read([0]).scatter(np.array([4, 4]), target, np.array([2, 0]))
    assert (target[[0, 2]] == numbered(12, 1, 512)).all()
    assert not target[1].any()


def test_a_failed_read_scatters_nothing() -> None:
    layout, file = placed(PooledClusters, 512, 30)
    file.failing_reads = {file.num_reads}
    read = layout.submit_read([0])
    target = np.zeros((10, 512), dtype=np.uint8)
    with pytest.raises(FetchError):
        read.scatter(np.arange(10), target, np.arange(10))
    assert not target.any()


def test_a_target_with_holes_is_refused() -> None:
    layout, _ = placed(PooledClusters, 512, 30)
    read = layout.submit_read([0])
    with pytest.raises(AssertionError, match="one run"):
        read.scatter(np.arange(2), np.zeros((4, 1024), np.uint8)[:, :512], np.arange(2))
