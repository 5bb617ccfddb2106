"""Clusters in files of four layouts while they change: access lengths and bytes moved."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters
from penstock.methods.dynakv.cluster_file import ClusterFile
from penstock.methods.dynakv.co_retrieval import co_retrievals, pool_order, retrieved
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.memory_file import MemoryFile
from research.clusters.key_stream import KeyStream
from research.clusters.replay import Settings, Step, fitted_clusters, replay

LAYOUTS = ("sequence", "packed", "intra", "inter", "gaps")
"""Strict sequence order; cluster by cluster without gaps; pools in arbitrary order; pools ordered
by co-retrieval, the paper's; the same, where free space between two clusters is read along."""
BUFFER_ENTRIES = 16
EARLY_PART = 8
_KIND: dict[str, type[ClusterFile]] = {
    "sequence": TokenOrder, "packed": PackedClusters, "intra": PooledClusters,
    "inter": PooledClusters, "gaps": PooledClusters,
}  # fmt: skip
GAP_BYTES = 24 << 10
"""Most free space that is read along: below that size UFS takes the same time for a request,
however short (DynaKV, figure 3b)."""
_MARK_BYTES = 8

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """What one layout cost over all steps of one layer, its heads added."""

    access_lengths: dict[int, int]
    """Accesses by the entries in each."""
    early_lengths: dict[int, int]
    """Of the first eighth of the steps, before splits have scattered the prompt's order."""
    read_bytes: int
    gap_bytes: int
    """Of `read_bytes`, free space and clusters that nobody asked for."""
    moved_bytes: int
    """Stored entries that got another place, after the prompt was placed."""
    appended_bytes: int
    end_bytes: int
    """Length of the files at the end."""
    used_bytes: int
    """Of it, entries."""


def run_layouts(
    stream: KeyStream, layer: int, settings: Settings, *, entry_bytes: int,
    on_step: Callable[[int], None] = lambda _: None,
) -> dict[str, LayoutCost]:  # fmt: skip
    """Decode one layer with adaptive clusters, every head in a file of each layout.

    A sector is one entry here, so that an access is a run of entries that follow each other and
    nothing is rounded; write buffers, which are for sectors, are left out.

    Args:
        entry_bytes: K and V of one token and head.
        on_step: called with the steps done.
    """
    clusters = fitted_clusters(stream, layer, settings, "adaptive", BUFFER_ENTRIES)
    heads = [
        _stored(clusters, stream, layer, row, settings, entry_bytes)
        for row in range(len(stream.keys[layer]))
    ]
    early = max(1, stream.output_tokens // EARLY_PART)
    for step in replay(clusters, stream, layer, settings):
        for row, files in enumerate(heads):
            for file in files.values():
                file.take(step, row)
                if step.number + 1 == early:
                    file.early_lengths = dict(file.file.counters.access_lengths)
        on_step(step.number + 1)
    return {name: _cost([files[name] for files in heads]) for name in LAYOUTS}


class StoredHead:
    """One head's clusters in a file: does there what the clusters did in a step."""

    def __init__(self, layout: str, entry_bytes: int, tokens: int) -> None:
        disk = MemoryFile()
        disk.sector_bytes = entry_bytes
        gap = GAP_BYTES // entry_bytes * entry_bytes if layout == "gaps" else 0
        self.file = _KIND[layout](disk, entry_bytes, gap_bytes=gap)
        self._entries = np.zeros((tokens, entry_bytes), dtype=np.uint8)
        self._entries[:, :_MARK_BYTES] = (
            np.arange(tokens, dtype=np.int64).view(np.uint8).reshape(tokens, _MARK_BYTES)
        )
        self.positions: dict[int, Int64Array] = {}
        """Of each cluster's stored entries, in their order in the file."""
        self.early_lengths: dict[int, int] = {}
        """Accesses of the first steps by the entries in each."""

    def place(self, order: list[int], members: dict[int, Int64Array]) -> None:
        """Store the prompt."""
        tokens = sum(map(len, members.values()))
        self.file.place(order, members, self._entries[:tokens])
        self.positions = dict(members)
        self.file.counters = type(self.file.counters)()

    def take(self, step: Step, row: int) -> None:
        """Read what a step retrieved, add its entry, and split."""
        self.file.read(step.chosen[row].nonzero()[0])
        number = int(step.cluster_of[row])
        if number >= 0:
            self._append(number, np.array([step.position]))
        for split, given in zip(step.adaptation.splits, step.positions, strict=True):
            if split.row != row:
                continue
            if (row, split.cluster) in step.adaptation.loaded:
                self.file.read([split.cluster])
            stored = self.positions[split.cluster]
            new = given[~np.isin(given, stored)]
            if split.child < 0:
                self._append(split.cluster, new)
                continue
            both = np.concatenate([stored, new])
            stays = ~np.isin(both, given[split.moves])
            done = self.file.split(split.cluster, split.child, stays, self._entries[both])
            self.positions[split.cluster] = both[done.kept]
            self.positions[split.child] = both[done.moved]

    def _append(self, cluster: int, new: Int64Array) -> None:
        self.file.append(cluster, self._entries[new])
        self.positions[cluster] = np.concatenate([self.positions[cluster], new])


def _stored(
    clusters: AdaptiveClusters, stream: KeyStream, layer: int, row: int, settings: Settings,
    entry_bytes: int,
) -> dict[str, StoredHead]:  # fmt: skip
    """The prompt of one head in a file of every layout."""
    count = int(clusters.statistics.counts[row])
    members = {cluster: clusters.members(row, cluster) for cluster in range(count)}
    asked = slice(stream.prompt_tokens // 2, stream.prompt_tokens)  # the past is mostly there
    queries = stream.grouped_queries(layer)[row, :, asked]
    taken = retrieved(
        queries.transpose(0, 1), clusters.representatives[row, :count],
        torch.from_numpy(clusters.entry_counts()[row, :count]),
        math.ceil(settings.top * stream.prompt_tokens), stream.scaling[layer],
    )  # fmt: skip
    ordered = pool_order(co_retrievals(taken)).tolist()
    out = {}
    for name in LAYOUTS:
        out[name] = StoredHead(name, entry_bytes, stream.keys[layer].shape[1])
        out[name].place(ordered if name in ("inter", "gaps") else list(range(count)), members)
    return out


def _cost(heads: list[StoredHead]) -> LayoutCost:
    files = [head.file for head in heads]
    return LayoutCost(
        access_lengths=_added([file.counters.access_lengths for file in files]),
        early_lengths=_added([head.early_lengths for head in heads]),
        read_bytes=sum(file.counters.read_bytes for file in files),
        gap_bytes=sum(file.counters.gap_bytes for file in files),
        moved_bytes=sum(file.counters.moved_bytes for file in files),
        appended_bytes=sum(file.counters.appended_bytes for file in files),
        end_bytes=sum(file.end_bytes for file in files),
        used_bytes=sum(file.used_bytes for file in files),
    )


def _added(counts: list[dict[int, int]]) -> dict[int, int]:
    out: dict[int, int] = {}
    for one in counts:
        for entries, times in one.items():
            out[entries] = out.get(entries, 0) + times
    return dict(sorted(out.items()))
