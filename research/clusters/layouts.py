"""Clusters in files of four layouts while they change; and in a plane, for a picture."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters
from penstock.methods.dynakv.cluster_file import ClusterFile
from penstock.methods.dynakv.co_retrieval import co_retrievals, pool_order, retrieved
from penstock.methods.dynakv.naive_clusters import PackedClusters, TokenOrder
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.storage.memory_file import MemoryFile
from research.clusters.recording import KeyStream
from research.clusters.replay import Settings, Step, fitted_clusters, renumbered, replay

# Access lengths and bytes moved -------------------------------------------------------------------

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
    """Of `read_bytes`, free space and clusters that were not asked for."""
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


# Prompt, early and late output, and which cluster each belongs to ---------------------------------

MOST_POINTS = 900
"""Tokens of a picture, evenly spaced; more hide each other."""


def plane(keys: Tensor) -> tuple[Tensor, Tensor, float]:
    """The two directions in which keys differ most (PCA).

    Args:
        keys: of one head. [tokens, head_dim]

    Returns:
        The mean key, float64 [head_dim]; the directions, float64 [head_dim, 2]; and the share of
        the variance that they show.
    """
    points = keys.double()
    mean = points.mean(dim=0)
    _, values, rows = torch.linalg.svd(points - mean, full_matrices=False)
    energy = values.square()
    return mean, rows[:2].T.contiguous(), float(energy[:2].sum() / energy.sum().clamp_min(1e-30))


def picture(
    keys: Tensor, prompt_tokens: int, *, before: Tensor, after: Tensor, name: str
) -> dict[str, Any]:  # fmt: skip
    """What a drawing needs, for JSON: places in the plane, as thousandths of the farthest.

    Args:
        keys: of one head, prompt and output. [tokens, head_dim]
        before: each token's cluster when only the prompt's clusters exist. int64 [tokens]
        after: each token's cluster at the end. int64 [tokens]
        name: of the head.
    """
    mean, directions, shown = plane(keys)
    flat = (keys.double() - mean) @ directions
    scale = flat.abs().max().clamp_min(1e-30) / 1000
    tokens = torch.linspace(0, len(keys) - 1, min(MOST_POINTS, len(keys))).long()
    out: dict[str, Any] = {
        "name": name, "variance_shown": round(shown, 4),
        "prompt_tokens": prompt_tokens, "tokens": len(keys),
        "token": _line(tokens), "x": _line(flat[tokens, 0] / scale),
        "y": _line(flat[tokens, 1] / scale),
    }  # fmt: skip
    for kind, labels in (("before", before), ("after", after)):
        names, dense = renumbered(labels)
        sums = flat.new_zeros(names, 2).index_add_(0, dense, flat)
        sizes = torch.bincount(dense, minlength=names)
        if kind == "before":  # the prompt's clusters: their centre is that of the prompt's keys
            first = dense[:prompt_tokens]
            sums = flat.new_zeros(names, 2).index_add_(0, first, flat[:prompt_tokens])
            sizes = torch.bincount(first, minlength=names)
        centres = sums / sizes.clamp_min(1)[:, None] / scale
        out[kind] = {
            "cluster": _line(dense[tokens]), "x": _line(centres[:, 0]), "y": _line(centres[:, 1]),
            "first_token": _line(_first(dense, names)),
        }  # fmt: skip
    return out


def numbers(line: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Read back what a picture keeps in a line of text."""
    return np.array(line.split(), dtype=np.int64)


def chosen_heads(late: Tensor) -> list[tuple[int, int]]:
    """The head in the middle by drift, and the one that drifts most.

    Args:
        late: share of late output keys outside all clusters. [layers, kv_heads]
    """
    order = late.flatten().argsort(stable=True).tolist()
    heads = late.shape[1]
    middle, most = order[len(order) // 2], order[-1]
    return [divmod(place, heads) for place in dict.fromkeys((middle, most))]


def _first(dense: Tensor, count: int) -> Tensor:
    """The first token of each cluster."""
    places = torch.arange(len(dense))
    out = torch.full((count,), len(dense), dtype=torch.int64)
    return out.scatter_reduce_(0, dense, places, "amin")


def _line(values: Tensor) -> str:
    """Whole numbers in one line of text: a line a number would make files of thousands of lines."""
    return " ".join(str(int(value)) for value in values.round())
