"""PooledClusters: clusters in dual-head pools, hot ones through write buffers (DynaKV)."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from penstock.core.errors import StorageError
from penstock.methods.dynakv.cluster_file import ClusterFile, Split, new_clusters, scatter
from penstock.methods.dynakv.cluster_pools import ClusterPools, Half
from penstock.methods.dynakv.cluster_spans import Located, merge
from penstock.methods.dynakv.write_buffers import WriteBuffers
from penstock.storage.file import ByteArray, Int64Array, KVFile


class PooledClusters(ClusterFile):
    """The layout of the paper; with an arbitrary order, its intra-cluster placement alone.

    Source: DynaKV, section 5.2. An append to a buffered cluster is a copy in memory until a
    sector is full; to another one, it reads the last sector and writes it again. A split writes the
    new child to another place and fills its holes in the old one with entries from the end.

    Differences: see `ClusterPools` and `WriteBuffers`. The paper's split is free of movement but
    for the child that leaves; its other child has holes, and here they are closed, which is counted
    in `moved_bytes` with the child that left.
    """

    def __init__(
        self, file: KVFile, entry_bytes: int, *, sector_bytes: int | None = None,
        num_buffers: int = 0, gap_bytes: int = 0, headroom: float = 1.0,
    ) -> None:  # fmt: skip
        """Arguments as in `ClusterFile`; `headroom` is for `ClusterPools`."""
        super().__init__(
            file, entry_bytes, sector_bytes=sector_bytes, num_buffers=num_buffers,
            gap_bytes=gap_bytes,
        )  # fmt: skip
        self.pools = ClusterPools(entry_bytes, self.sector_bytes, headroom)
        self._buffers = WriteBuffers(num_buffers, self.sector_bytes)

    @override
    def clusters(self) -> list[int]:
        return self.pools.clusters()

    @override
    def num_entries(self, cluster: int) -> int:
        return int(self.pools.count[cluster])

    @property
    @override
    def end_bytes(self) -> int:
        return self.pools.end_bytes

    # Operations -------------------------------------------------------------------------------

    @override
    def place(
        self, order: Sequence[int], members: Mapping[int, Int64Array], entries: ByteArray
    ) -> None:
        """Order[2i + 1] and order[2i + 2] touch."""
        self._check_new(entries)
        new = new_clusters(order, members, self.pools, len(entries))
        if not new:
            return
        self.pools.lay_out(order, {cluster: len(members[cluster]) for cluster in new})
        try:
            self._reserve(self.end_bytes)
            self._write_whole(new, [members[cluster] for cluster in new], entries)
        except StorageError:
            for cluster in new:
                self.pools.free(cluster)
            raise
        self.counters.placed_bytes += entries.size

    @override
    def append(self, cluster: int, entries: ByteArray) -> None:
        self._check_new(entries)
        if len(entries) == 1 and self._buffer_one(cluster, entries.reshape(-1).data):
            return
        self._refuse_spoiled([cluster])
        if not len(entries):
            return
        self._make_room(cluster, len(entries))
        self._buffers.heat_up(cluster)
        buffer = self._claim_buffer(cluster)
        count, half = self.num_entries(cluster), self.pools.half(cluster)
        used = count * self.entry_bytes % self.sector_bytes
        if buffer is not None and used + entries.size < self.sector_bytes:
            _fill(buffer, used, entries, half.side)
        else:
            self._write_on(half, count, self._last_sector(cluster), entries, buffer)
        self.pools.resize(cluster, count + len(entries))
        self.counters.appended_bytes += entries.size

    @override
    def append_each(self, clusters: Int64Array, entries: ByteArray) -> None:
        numbers, size = self._check_each(clusters, entries), self.entry_bytes
        flat = np.ascontiguousarray(entries).reshape(-1).data
        for i, cluster in enumerate(numbers):
            if not self._buffer_one(cluster, flat[i * size : (i + 1) * size]):
                self.append(cluster, entries[i : i + 1])

    @override
    def split(
        self, cluster: int, new_cluster: int, stays: npt.NDArray[np.bool_],
        entries: ByteArray | None = None,
    ) -> Split:  # fmt: skip
        """The larger child is better left to stay."""
        self._refuse_spoiled([cluster])
        assert new_cluster not in self.pools, "has a place"
        count = self.num_entries(cluster)
        entries = self._load(cluster) if entries is None else self._check_new(entries)
        assert len(stays) == len(entries) >= count, (len(stays), len(entries), count)
        kept, moved = _without_holes(stays)
        assert len(kept), "nothing stays"
        assert len(moved), "nothing moves"
        self._make_room(cluster, len(kept) - count)
        self.settle_reads()
        self.pools.resize(cluster, max(count, len(kept)))  # no other cluster gets that place
        half = self.pools.reserve_half(len(moved), near=cluster)
        try:
            self._reserve(self.end_bytes)
            self._write_on(half, 0, None, entries[moved], None)
            changed = (kept != np.arange(len(kept))) | (np.arange(len(kept)) >= count)
            try:
                self._rewrite(cluster, entries[kept], changed)
            except StorageError:
                self._spoiled.add(cluster)
                raise
        except StorageError:
            self.pools.give_up(half)
            self.pools.resize(cluster, count)
            raise
        self.pools.put(new_cluster, half, len(moved))
        self.pools.resize(cluster, len(kept))
        self.counters.num_splits += 1
        self.counters.appended_bytes += (len(entries) - count) * self.entry_bytes
        num_moved = (moved < count).sum() + (changed & (kept < count)).sum()
        self.counters.moved_bytes += int(num_moved) * self.entry_bytes
        return Split(kept, moved)

    @override
    def free(self, cluster: int) -> None:
        self.settle_reads()
        self._buffers.forget(cluster)
        self._spoiled.discard(cluster)
        self.pools.free(cluster)

    @override
    def _forget_all(self) -> None:
        self.pools.clear()
        self._buffers.clear()

    @override
    def flush(self) -> None:
        for cluster in self._buffers.clusters():
            self._write_buffer(cluster)

    # Buffers ----------------------------------------------------------------------------------

    def _claim_buffer(self, cluster: int) -> ByteArray | None:
        """The buffer of a cluster that has one or is hot enough to get one, its content loaded."""
        if (buffer := self._buffers.get(cluster)) is not None:
            return buffer
        if (victim := self._buffers.colder_than(cluster)) is not None:
            self._write_buffer(victim)
            self._buffers.release(victim)
        if not self._buffers.has_free():
            return None
        last = self._last_sector(cluster)
        buffer = self._buffers.assign(cluster)
        buffer[:] = 0 if last is None else last
        return buffer

    def _buffer_one(self, cluster: int, entry: memoryview) -> bool:
        """Append one entry to a cluster with a buffer that takes it; whether that was so.

        The buffer is written when that fills it.

        Args:
            entry: its bytes, contiguous.
        """
        pools, size, sector = self.pools, self.entry_bytes, self.sector_bytes
        if cluster not in self._buffers or cluster in self._spoiled:
            return False
        count = int(pools.count[cluster])
        used = count * size % sector
        end = used + size
        if end > sector or (not used and pools.room(cluster) < 1):
            return False
        self._buffers.heat_up(cluster)
        grows_down = pools.side[cluster] == 1
        self._buffers.fill(cluster, sector - end if grows_down else used, entry)
        if end == sector and (buffer := self._buffers.get(cluster)) is not None:
            base, begin = int(pools.base[cluster]), count * size - used
            self._write(base - begin - sector if grows_down else base + begin, buffer)
        pools.count[cluster] = count + 1
        self.counters.appended_bytes += size
        return True

    def _write_buffer(self, cluster: int) -> None:
        buffer = self._buffers.get(cluster)
        at = self._last_sector_at(cluster)
        if buffer is not None and at is not None:
            self._write(at, buffer)

    def _last_sector_at(self, cluster: int) -> int | None:
        """Address of the last sector of a cluster where it is not full, or None."""
        whole, rest = divmod(self.num_entries(cluster) * self.entry_bytes, self.sector_bytes)
        if not rest:
            return None
        base, step = int(self.pools.base[cluster]), whole * self.sector_bytes
        return base - step - self.sector_bytes if self.pools.side[cluster] else base + step

    def _last_sector(self, cluster: int) -> ByteArray | None:
        """Its content, uint8 [sector_bytes], from memory or the file; None where there is none."""
        at = self._last_sector_at(cluster)
        if at is None:
            return None
        buffer = self._buffers.get(cluster)
        return self._read_old(at, self.sector_bytes) if buffer is None else buffer

    # Bytes ------------------------------------------------------------------------------------

    def _write_on(
        self, half: Half, count: int, last: ByteArray | None, entries: ByteArray,
        buffer: ByteArray | None,
    ) -> None:  # fmt: skip
        """Write `entries` after the `count` that are there; what fills no sector goes to `buffer`.

        Args:
            last: the sector that they begin in, where it has entries.
            buffer: None: what fills no sector is written too.
        """
        sector = self.sector_bytes
        begin = count * self.entry_bytes // sector * sector
        used = count * self.entry_bytes - begin
        assert (last is None) == (used == 0), (used, last is None)
        num_bytes = -(-(used + entries.size) // sector) * sector
        image = self._new_image(num_bytes)
        if last is not None:
            image[-sector if half.side else 0 :][:sector] = last
        _fill(image, used, entries, half.side)
        written = num_bytes if buffer is None else (used + entries.size) // sector * sector
        base = self.pools.origin(half)
        if written and half.side:
            self._write(base - begin - written, image[num_bytes - written :])
        elif written:
            self._write(base + begin, image[:written])
        if buffer is not None and written < num_bytes:
            buffer[:] = image[:sector] if half.side else image[written:]

    def _write_whole(
        self, clusters: list[int], members: list[Int64Array], entries: ByteArray
    ) -> None:
        """Write new clusters, those that touch at once."""
        found = self._locate(np.array(clusters, dtype=np.int64))
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *members])
        spans = merge(found.lows, found.highs)
        addresses, span_of = found.addresses(), spans.span_of.repeat(found.lengths)
        by_span = span_of.argsort(kind="stable")
        bounds = span_of[by_span].searchsorted(np.arange(len(spans.lows) + 1))
        for span, (low, high) in enumerate(
            zip(spans.lows.tolist(), spans.highs.tolist(), strict=True)
        ):
            here = by_span[bounds[span] : bounds[span + 1]]
            if len(here):
                image = self._new_image(high - low)
                scatter(image, addresses[here] - low, entries[rows[here]])
                self._write(low, image)

    def _rewrite(self, cluster: int, entries: ByteArray, changed: npt.NDArray[np.bool_]) -> None:
        """Write the sectors of a cluster that hold changed entries; its count is not yet changed.

        Args:
            entries: all that it has from now on. uint8 [entries, entry_bytes]
            changed: bool [entries]
        """
        size, sector, side = self.entry_bytes, self.sector_bytes, int(self.pools.side[cluster])
        num_sectors = self.pools.sectors(len(entries))
        image = self._new_image(num_sectors * sector)
        _fill(image, 0, entries, side)
        slots = changed.nonzero()[0]
        dirty = np.zeros(num_sectors + 1, dtype=np.int64)
        np.add.at(dirty, slots * size // sector, 1)
        np.add.at(dirty, ((slots + 1) * size - 1) // sector + 1, -1)
        is_dirty = dirty.cumsum()[:-1] > 0  # in the order of growth
        buffer, at = self._buffers.get(cluster), int(self.pools.base[cluster])
        in_buffer = buffer is not None and entries.size % sector != 0
        if in_buffer:
            is_dirty[-1] = False
        if side:
            is_dirty, at = is_dirty[::-1], at - len(image)
        edges = np.diff(np.concatenate([[False], is_dirty, [False]]).astype(np.int8)).nonzero()[0]
        for first, end in edges.reshape(-1, 2).tolist():
            self._write(at + first * sector, image[first * sector : end * sector])
        if in_buffer and buffer is not None:
            buffer[:] = image[:sector] if side else image[-sector:]

    def _load(self, cluster: int) -> ByteArray:
        """A copy of a cluster's entries, read in order to write: uint8 [count, entry_bytes]."""
        size, sector, side = self.entry_bytes, self.sector_bytes, int(self.pools.side[cluster])
        num_bytes = self.num_entries(cluster) * size
        if not num_bytes:
            return np.zeros((0, size), dtype=np.uint8)
        padded = -(-num_bytes // sector) * sector
        stored = self._read_old(int(self.pools.base[cluster]) - side * padded, padded)
        buffer = self._buffers.get(cluster)
        if buffer is not None and padded > num_bytes:
            stored[0 if side else padded - sector :][:sector] = buffer
        if side:
            return stored[padded - num_bytes :].reshape(-1, size)[::-1].copy()
        return stored[:num_bytes].reshape(-1, size).copy()

    def _make_room(self, cluster: int, num_entries: int) -> None:
        """Move the cluster, or its partner, where so many entries more do not fit in place."""
        if self.pools.room(cluster) >= num_entries:
            return
        mover = self.pools.crowded(cluster, num_entries)
        self._refuse_spoiled([mover])
        self.settle_reads()
        entries = self._load(mover)
        extra = num_entries if mover == cluster else 0
        half = self.pools.reserve_half(len(entries) + extra, near=mover)
        try:
            self._reserve(self.end_bytes)
            self._write_on(half, 0, None, entries, self._buffers.get(mover))
        except StorageError:
            self.pools.give_up(half)
            raise
        self.pools.put(mover, half, len(entries))
        self.counters.num_moves += 1
        self.counters.moved_bytes += entries.size

    @override
    def _locate(self, clusters: Int64Array) -> Located:
        """One range per cluster."""
        pools, size, sector = self.pools, self.entry_bytes, self.sector_bytes
        count, base, side = pools.count[clusters], pools.base[clusters], pools.side[clusters]
        assert not len(side) or side.min() >= 0, "no such cluster"
        num_bytes = count * size
        rest = num_bytes % sector
        padded = num_bytes + (sector - rest) * (rest > 0)
        lows = base - padded * side
        slots = self._buffers.slots(clusters)
        is_buffered = (slots >= 0) & (rest > 0)
        held = lows + (padded - sector) * (1 - side)
        return Located(
            count, lows, lows + padded, count - rest // size * is_buffered, count,
            base - size * side, size - 2 * size * side, held[is_buffered],
            self._buffers.rows[slots[is_buffered]],
        )  # fmt: skip


def _fill(image: ByteArray, used: int, entries: ByteArray, side: int) -> None:
    """Put entries behind the first `used` bytes of an image, in the direction of growth."""
    if side:
        end = len(image) - used
        image[end - entries.size : end] = entries[::-1].reshape(-1)
    else:
        image[used : used + entries.size] = entries.reshape(-1)


def _without_holes(stays: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """Who stays, those at the end in the places of those who leave; and who leaves."""
    staying, leaving = stays.nonzero()[0], (~stays).nonzero()[0]
    kept = np.arange(len(staying))
    kept[~stays[: len(staying)]] = staying[staying >= len(staying)]
    return kept, leaving
