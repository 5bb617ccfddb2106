"""ClusterFollower: takes each step's token into a layer's clusters, and splits what is due."""

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.key_index import KeyIndex
from penstock.engine.layer_cache import LayerSetup
from penstock.engine.slot_transfer import SlotTransfer
from penstock.engine.tiers.rolling_window import RollingWindow
from penstock.engine.tiers.slot_table import SlotTable
from penstock.engine.tiers.token_pool import TokenPool
from penstock.methods.dynakv.index import FollowedClusters
from penstock.methods.dynakv.layout import ClusterLayout
from penstock.methods.dynakv.representative_file import Written
from penstock.methods.dynakv.representatives import LayerRepresentatives
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import ByteArray, Int64Array


class Followed(NamedTuple):
    """What it took to follow one step."""

    seconds: float
    adapt_s: float
    """Of them, in the clusters themselves."""
    writes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


class ClusterFollower:
    """Works behind the attention, on the entries that the step has in its slots and its window.

    Source: DynaKV, section 4.2 and Algorithm 1: a cluster that must be split is split when it has
    been retrieved, so that nothing is read for it; what waits is bounded, and what is over is read.
    """

    def __init__(
        self, index: KeyIndex, layout: ClusterLayout | None,
        representatives: LayerRepresentatives | None, *, setup: LayerSetup, pool: TokenPool,
        window: RollingWindow, transfer: SlotTransfer,
    ) -> None:  # fmt: skip
        """For one layer.

        Args:
            index: the layer's; its core is `FollowedClusters`.
            representatives: get what changed; None where they stay in memory.
        """
        assert isinstance(index.unwrapped, FollowedClusters)
        self._index, self._followed, self._layout = index, index.unwrapped, layout
        self._representatives = representatives
        self._changed: set[tuple[int, int]] = set()
        self._setup, self._pool, self._window, self._transfer = setup, pool, window, transfer
        self.updated_at = np.zeros(self._followed.whole.shape, dtype=np.int32)
        """Position of the token that each cluster was appended to or split at last; 0 for never.
        [rows, most clusters]"""
        self._adapt_s = 0.0

    def begin(self) -> None:
        """Forget when clusters were updated."""
        self.updated_at.fill(0)

    @property
    def _live(self) -> ClusterLayout | None:
        return self._layout if self._layout is not None and self._layout.live else None

    def follow(self, position: int, table: SlotTable, length: int) -> Followed:
        """Take in the token of a step, then split what is due.

        Args:
            position: of the token, which is in the window.
            table: what the slots hold, as the step left them.
            length: tokens of the sequence, this one included.

        Raises:
            StorageError: something could not be written or read.
        """
        start = time.perf_counter()
        clusters, layout = self._followed.clusters, self._live
        before = None if layout is None else replace(layout.counters)
        entries = self._window_entries(position)
        begun = time.perf_counter()
        self._index.append(self.keys_of(entries)[:, None, None], position)
        self._adapt_s = time.perf_counter() - begun
        labels, rows = self._followed.labels[:, 0], np.arange(len(entries))
        self.updated_at[rows, np.maximum(labels, ~labels)] = position
        if clusters.update == "adaptive":
            self._changed.update((row, c) for row, c in enumerate(labels.tolist()) if c >= 0)
        if layout is not None:
            layout.append(position - self._followed.base, labels, entries)
        for at in clusters.due(self._followed.whole):
            self._split(*at, position, table, length)
        for at in clusters.overfull():
            clusters.num_loaded += 1
            self._split(*at, position, table, length)
        written = self._write_changed()
        done = Followed(
            time.perf_counter() - start, self._adapt_s, written.writes, written.num_bytes
        )
        if layout is None or before is None:
            return done
        now = layout.counters
        return done._replace(
            writes=done.writes + now.num_writes - before.num_writes,
            written_bytes=done.written_bytes + now.written_bytes - before.written_bytes,
            read_bytes=now.reread_bytes - before.reread_bytes + now.read_bytes - before.read_bytes,
        )

    def _write_changed(self) -> Written:
        """Write the representatives that this step has changed."""
        changed, self._changed = self._changed, set()
        if self._representatives is None or not changed:
            return Written(0, 0)
        return self._representatives.write(changed)

    def _split(self, row: int, cluster: int, position: int, table: SlotTable, length: int) -> None:
        clusters, layout = self._followed.clusters, self._live
        members, waiting = clusters.members(row, cluster), clusters.buffered(row, cluster)
        if layout is not None:
            members = layout.in_file_order(row, members)
        positions = np.concatenate([members, waiting])
        entries = self._entries(row, cluster, positions, len(members), table, length)
        begun = time.perf_counter()
        done = clusters.split(row, cluster, self.keys_of(entries), positions)
        self._adapt_s += time.perf_counter() - begun
        if layout is not None:
            layout.split(row, cluster, done.child, done.moves, positions, entries)
        self.updated_at[row, cluster] = position
        self._changed.add((row, cluster))
        if done.child >= 0:
            self.updated_at[row, done.child] = position
            self._changed.add((row, done.child))

    # Entries ----------------------------------------------------------------------------------

    def keys_of(self, entries: ByteArray) -> Tensor:
        """Keys of entries: a view. [entries, head_dim]

        Args:
            entries: uint8 [entries, entry_bytes]
        """
        shape = self._setup.shape
        return torch.from_numpy(entries).view(shape.dtype)[:, : shape.head_dim]

    def _window_entries(self, position: int) -> ByteArray:
        """One token of the window, of every row: uint8 [rows, entry_bytes]."""
        place = int(self._window.window_places(torch.tensor([position]))[0])
        tokens = self._window.tokens[:, place].contiguous()
        return tokens.view(torch.uint8).view(len(tokens), -1).cpu().numpy()

    def _entries(
        self, row: int, cluster: int, positions: Int64Array, stored: int, table: SlotTable,
        length: int,
    ) -> ByteArray:  # fmt: skip
        """K and V of the tokens of a cluster: from the slots, the window and what waits; else from
        the store. uint8 [entries, entry_bytes]"""
        out = np.empty((len(positions), self._setup.shape.token_bytes), dtype=np.uint8)
        units = positions + self._followed.base
        slots = table.slot_of[row, units].astype(np.int64)
        held = slots >= 0
        self._copy_out(out, held, row * self._pool.slots_per_row + slots[held])
        first_in_window = self._window.first_window_unit(length)
        for i in (~held & (units >= first_in_window)).nonzero()[0].tolist():
            out[i] = self._window_entries(int(units[i]))[row]
            held[i] = True
        missing = (~held).nonzero()[0]
        if not len(missing):
            return out
        if (layout := self._live) is None:
            out[missing] = self.read_tokens(row, units[missing])
            return out
        inside = missing[missing < stored]
        if len(inside):
            out[inside] = layout.read(row, cluster)[inside]
        for i in missing[missing >= stored].tolist():
            out[i] = layout.waiting(row, int(positions[i]))
        return out

    def _copy_out(self, out: ByteArray, where: NDArray[np.bool_], rows: Int64Array) -> None:
        if len(rows):
            memory = self._pool.memory
            out[where] = memory[torch.from_numpy(rows).to(memory.device)].cpu().numpy()

    def read_tokens(self, row: int, units: Int64Array) -> ByteArray:
        """Tokens of one row from the region in order, past the slots.

        Args:
            units: cache positions. [tokens]

        Returns:
            uint8 [tokens, entry_bytes]

        Raises:
            FetchError: a read failed.
        """
        region = self._transfer.region
        buffer = AlignedBuffer(len(units), region.padded_bytes)
        where = self._setup.units.table[row, units]
        region.submit_read(where, buffer, np.arange(len(units))).wait()
        return buffer.array[:, : region.unit_bytes]
