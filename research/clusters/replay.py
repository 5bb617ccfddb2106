"""Clusters over a recorded stream: how far keys drift, how tight clusters stay, what they find."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.kmeans import kmeans, nearest
from penstock.kernels.unit_selection import unit_scores
from penstock.methods.dynakv.adaptive_clusters import Adaptation, AdaptiveClusters, UpdateRule
from research.clusters.recording import KeyStream
from research.statistics.keys import held_out, squared_distances

# How far the output's keys are from the prompt's clusters, by place in the output -----------------

ITERATIONS = 10
ELEMENTS = 1 << 22
PARTS = 8
"""Equal parts of the output in which drift is told."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """One layer's drift; everything by KV head."""

    outside: Tensor
    """Share of the output's keys that are farther from the nearest cluster of the prompt than any
    key of that cluster. float32 [kv_heads, parts]"""
    outside_prompt: Tensor
    """The same of prompt tokens that took no part in the clustering: what is outside without any
    drift. float32 [kv_heads]"""
    distance: Tensor
    """Mean squared distance from the nearest cluster, in that of those prompt tokens. float32
    [kv_heads, parts]"""
    shift: Tensor
    """Distance of the mean key from the prompt's mean key, in root mean square distances of the
    prompt's keys from it. float32 [kv_heads, parts]"""


def measure_drift(keys: Tensor, prompt_tokens: int, *, cluster_tokens: int, seed: int) -> Drift:
    """Compare a layer's output keys with clusters of its prompt's keys.

    Source: DynaKV, section 2.3: "newly generated entries may be distant from all existing
    clusters". The paper shows a projection; shares and distances are ours.

    Any new key is farther away than the keys that a cluster was made of, drift or not: one prompt
    token of eight is left out of the clustering and says how often and how far.

    Args:
        keys: prompt and output. [kv_heads, tokens, head_dim]
        cluster_tokens: mean size of a cluster.
    """
    prompt, output = keys[:, :prompt_tokens], keys[:, prompt_tokens:]
    kept_out = held_out(prompt_tokens, seed)
    fitted = prompt[:, ~kept_out]
    centroids = kmeans(
        fitted, max(1, fitted.shape[1] // cluster_tokens), iterations=ITERATIONS, cosine=False,
        seed=seed, elements=ELEMENTS,
    )  # fmt: skip
    own = nearest(fitted, centroids, cosine=False, elements=ELEMENTS)
    far = squared_distances(fitted, centroids)
    radius = far.new_zeros(centroids.shape[:2]).scatter_reduce_(1, own, far, "amax")
    calm, calm_far = _outside(prompt[:, kept_out], centroids, radius)
    new, new_far = _outside(output, centroids, radius)
    mean = prompt.mean(dim=1, keepdim=True)
    unit = (prompt - mean).square().sum(dim=-1).mean(dim=1).sqrt()
    parts = min(PARTS, output.shape[1])
    means = torch.stack([part.mean(dim=1) for part in output.tensor_split(parts, dim=1)], dim=1)
    return Drift(
        outside=_by_part(new.float(), parts), outside_prompt=calm.float().mean(dim=1),
        distance=_by_part(new_far, parts) / calm_far.mean(dim=1, keepdim=True),
        shift=(means - mean).norm(dim=-1) / unit[:, None],
    )  # fmt: skip


def drift_figures(
    stream: KeyStream, *, cluster_tokens: int, seed: int
) -> tuple[dict[str, Any], Tensor]:
    """Drift of all layers: the means over KV heads, for JSON.

    Returns:
        The figures, and the share outside in the last part by layer and KV head, float32
        [layers, kv_heads].
    """
    found = [
        measure_drift(keys, stream.prompt_tokens, cluster_tokens=cluster_tokens, seed=seed)
        for keys in stream.keys
    ]
    parts = found[0].outside.shape[1]
    ends = [part[-1] + 1 for part in _parts(stream.output_tokens, parts)]
    figures = {
        "parts": parts, "part_ends": ends,
        "outside": [_rounded(one.outside.mean(dim=0)) for one in found],
        "outside_prompt": [round(float(one.outside_prompt.mean()), 4) for one in found],
        "distance": [_rounded(one.distance.mean(dim=0)) for one in found],
        "shift": [_rounded(one.shift.mean(dim=0)) for one in found],
    }  # fmt: skip
    return figures, torch.stack([one.outside[:, -1] for one in found])


def _outside(points: Tensor, centroids: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Which points no cluster reaches to, and squared distances; both [kv_heads, points]."""
    index = nearest(points, centroids, cosine=False, elements=ELEMENTS)
    far = squared_distances(points, centroids)
    return far > radius.gather(1, index), far


def _by_part(values: Tensor, parts: int) -> Tensor:
    """Means over equal parts. [kv_heads, points] -> [kv_heads, parts]"""
    return torch.stack([part.mean(dim=1) for part in values.tensor_split(parts, dim=1)], dim=1)


def _parts(tokens: int, parts: int) -> list[list[int]]:
    return [part.tolist() for part in torch.arange(tokens).tensor_split(parts)]


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values]


# Variance within them, recomputed from keys and labels (table 5) ----------------------------------


@dataclass(frozen=True, kw_only=True)
class Tightness:
    """Of one head's clusters, of the keys given, in float64."""

    by_key: float
    """Mean squared distance of a key from the mean of its cluster."""
    by_cluster: float
    """The mean over clusters of their variance: large and small ones count alike."""
    clusters: int
    largest: int
    """Keys of the largest cluster."""


def tightness(keys: Tensor, labels: Tensor) -> Tightness:
    """Variance within clusters, about the true mean of each.

    Args:
        keys: of one head. [tokens, head_dim]
        labels: each key's cluster, any numbers. int64 [tokens]
    """
    count, dense = renumbered(labels)
    points = keys.double()
    sizes = torch.bincount(dense, minlength=count)
    means = points.new_zeros(count, points.shape[1]).index_add_(0, dense, points)
    means /= sizes[:, None]
    squares = (points - means[dense]).square().sum(dim=1)
    variance = points.new_zeros(count).index_add_(0, dense, squares) / sizes
    return Tightness(
        by_key=float(squares.mean()), by_cluster=float(variance.mean()), clusters=count,
        largest=int(sizes.max()),
    )  # fmt: skip


def renumbered(labels: Tensor) -> tuple[int, Tensor]:
    """How many different labels there are, and labels from 0 on in their place. int64 [tokens]"""
    names, dense = np.unique(labels.numpy(), return_inverse=True)
    return len(names), torch.from_numpy(dense)


def global_labels(keys: Tensor, clusters: int, seed: int) -> Tensor:
    """The optimal partition of the paper's figure 4a, as k-means finds it: all keys at once.

    Args:
        keys: of one head. [tokens, head_dim]
    """
    centroids = kmeans(
        keys[None], clusters, iterations=ITERATIONS, cosine=False, seed=seed, elements=ELEMENTS
    )
    return nearest(keys[None], centroids, cosine=False, elements=ELEMENTS)[0]


# Retrieve, append, split, as Algorithm 1 has it ---------------------------------------------------

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

RECLUSTER_TOKENS = 320
"""New entries that "local" clusters together (ClusterKV, section 4.1)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all replays of a run have in common."""

    cluster_tokens: int
    """Mean size of an initial cluster."""
    top: float
    """Share of the past that a head retrieves in a step."""
    quantile: float = 0.9
    """Of the initial clusters' variances: tau of a head."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decode step of one layer; a row is a KV head."""

    number: int
    position: int
    """Of the new entry: how many came before."""
    chosen: BoolArray
    """Clusters retrieved, before the new entry was taken in. [rows, clusters]"""
    attended: BoolArray | None
    """The past entries in them; None in steps that were not asked for it. [rows, past]"""
    counts: Int64Array
    """Entries of each cluster at that time, members and buffered. [rows, clusters]"""
    buffered: Int64Array
    """Of these, entries that were in memory anyway. [rows, clusters]"""
    cluster_of: Int64Array
    """Cluster of the new entry; -1 - c where it waits for c's split. [rows]"""
    positions: list[Int64Array]
    """Positions of the entries given to each split of `adaptation`, members first."""
    loaded_entries: int
    """Entries on flash of the clusters that were loaded only to be split."""
    adaptation: Adaptation


def fitted_clusters(
    stream: KeyStream, layer: int, settings: Settings, update: UpdateRule, buffer_entries: int
) -> AdaptiveClusters:  # fmt: skip
    """The partition of a layer's prompt.

    Args:
        buffer_entries: most entries of the layer that may wait for a split; 0: none.
    """
    rows, tokens, dim = stream.keys[layer].shape
    clusters = AdaptiveClusters(
        rows=rows, dim=dim, max_tokens=tokens, max_clusters=tokens,
        tokens_per_cluster=settings.cluster_tokens, buffer_entries=buffer_entries + 1,
        update=update, recluster_tokens=max(RECLUSTER_TOKENS, settings.cluster_tokens),
        threshold_quantile=settings.quantile, seed=settings.seed,
    )  # fmt: skip
    clusters.fit(stream.keys[layer][:, : stream.prompt_tokens])
    return clusters


def replay(
    clusters: AdaptiveClusters, stream: KeyStream, layer: int, settings: Settings, *,
    look_every: int = 0,
) -> Iterator[Step]:  # fmt: skip
    """Take in a layer's output token by token, behind the prompt that is fitted.

    A step's queries choose clusters among the entries before it (`choose`). Then the step's key is
    taken in, and what is flagged and was retrieved is split.

    Args:
        look_every: tell the chosen entries in every so many steps; 0: never.
    """
    keys = stream.keys[layer]
    queries, scaling = stream.grouped_queries(layer), stream.scaling[layer]
    given: list[Int64Array] = []
    read = [0]

    def load(row: int, cluster: int) -> tuple[Tensor, Int64Array]:
        members = clusters.members(row, cluster)
        positions = np.concatenate([members, clusters.buffered(row, cluster)])
        given.append(positions)
        read[0] += len(members) * (not chosen[row, cluster])
        return keys[row, torch.from_numpy(positions)], positions

    for number in range(stream.output_tokens):
        at = stream.prompt_tokens + number
        counts = clusters.entry_counts().astype(np.int64)
        buffered = clusters.entries.buffer_counts[:, : counts.shape[1]].astype(np.int64)
        chosen = choose(
            queries[:, :, at], clusters.representatives, counts, settings.top, scaling
        )  # fmt: skip
        wanted = look_every and number % look_every == 0
        attended = clusters.entries.entries_of(chosen) if wanted else None
        given.clear()
        read[0] = 0
        new = clusters.append(keys[:, at : at + 1])[:, 0]
        yield Step(
            number=number, position=at, chosen=chosen, attended=attended, counts=counts,
            buffered=buffered, cluster_of=new,
            adaptation=clusters.adapt(_wide(chosen, clusters), load),
            positions=list(given), loaded_entries=read[0],
        )  # fmt: skip


def choose(
    query: Tensor, centroids: Tensor, counts: Int64Array, top: float, scaling: float
) -> BoolArray:
    """The best clusters of each row until they hold a share of the entries, the last one whole.

    Clusters are ranked as the engine ranks them (`unit_scores`).

    Args:
        query: post-RoPE. [rows, heads of a row, dim]
        centroids: [rows, clusters, dim]
        counts: entries; 0: no such cluster. [rows, clusters]
        top: the share.
        scaling: factor on the logits.

    Returns:
        [rows, clusters]
    """
    scores = unit_scores(query, centroids, torch.from_numpy(counts), scaling).numpy()
    order = np.argsort(-scores, axis=1, kind="stable")
    sizes = np.take_along_axis(counts, order, axis=1)
    before = sizes.cumsum(axis=1) - sizes
    budget = np.ceil(top * counts.sum(axis=1, keepdims=True))
    chosen = np.zeros(counts.shape, dtype=np.bool_)
    np.put_along_axis(chosen, order, (before < budget) & (sizes > 0), axis=1)
    return chosen


def _wide(chosen: BoolArray, clusters: AdaptiveClusters) -> BoolArray:
    """`chosen` with a place for clusters that the append has made ("local")."""
    more = clusters.num_clusters - chosen.shape[1]
    return chosen if more <= 0 else np.pad(chosen, ((0, 0), (0, more)))


# How tight they stay, what they find and read -----------------------------------------------------

LOOK_EVERY = 16
"""Steps between those in which the attention on what was retrieved is told."""
DELAYS = (1, 2, 4, 8, 16)
"""Steps behind an update within which its cluster is retrieved (table 2)."""
_NEVER = 1 << 30


def run_method(
    stream: KeyStream, settings: Settings, update: UpdateRule, buffer_entries: int, *,
    looks: bool = True, on_layer: Callable[[int], None] = lambda _: None,
) -> tuple[dict[str, Any], list[Tensor]]:  # fmt: skip
    """Decode all layers with one kind of clusters.

    Args:
        looks: also compare what is retrieved with full attention.
        on_layer: called with the layers done.

    Returns:
        Figures for JSON, and each layer's final partition: int64 [kv_heads, tokens].
    """
    counts, partitions = _Counts(), list[Tensor]()
    tight: list[list[Tightness]] = []
    for layer, keys in enumerate(stream.keys):
        clusters = fitted_clusters(stream, layer, settings, update, buffer_entries)
        counts.begin_layer()
        for step in replay(
            clusters, stream, layer, settings, look_every=LOOK_EVERY if looks else 0
        ):
            counts.add(step)
            if step.attended is not None:
                counts.look(attention_found(stream, layer, step, settings.top))
        counts.end_layer(clusters.num_splits, clusters.num_loaded)
        owners = clusters.entries.cluster_of[:, : clusters.length].astype(np.int64)
        partitions.append(torch.from_numpy(np.maximum(owners, ~owners)))
        tight.append([tightness(*pair) for pair in zip(keys, partitions[-1], strict=True)])
        on_layer(layer + 1)
    figures = {"update": update, "buffer": buffer_entries, **_tight_figures(tight)}
    return figures | counts.figures(), partitions


def global_method(
    stream: KeyStream, settings: Settings, clusters: list[int]
) -> dict[str, Any]:  # fmt: skip
    """The best partition of all keys at once, with as many clusters in each layer: a bound."""
    tight = [
        [tightness(head, global_labels(head, wanted, settings.seed)) for head in keys]
        for keys, wanted in zip(stream.keys, clusters, strict=True)
    ]
    return {"update": "global", "buffer": 0, **_tight_figures(tight)}


def attention_found(
    stream: KeyStream, layer: int, step: Step, top: float
) -> dict[str, float]:  # fmt: skip
    """How much of full attention is on what was retrieved, the new token left aside.

    Returns:
        mass: its share of the probability; recall: of the `top` tokens with the most; read: its
        share of the past; best: the probability on those `top` tokens, which is what retrieval
        of single tokens could find. Means over KV heads.
    """
    assert step.attended is not None, "this step was not asked for it"
    past = stream.keys[layer][:, : step.position]
    query = stream.grouped_queries(layer)[:, :, step.position]
    shares = (query @ past.transpose(1, 2) * stream.scaling[layer]).softmax(dim=-1).mean(dim=1)
    found = torch.from_numpy(step.attended)
    best = shares.topk(int(np.ceil(top * step.position)), dim=1)
    return {
        "mass": float((shares * found).sum(dim=1).mean()),
        "recall": float(found.gather(1, best.indices).float().mean()),
        "read": float(found.float().mean()),
        "best": float(best.values.sum(dim=1).mean()),
    }


class _Counts:
    """What is added up over steps and layers; everything in entries."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("retrieved", "fetched", "split_loads", "loads", "splits"), 0)
        self._looks: list[dict[str, float]] = []
        self._before: BoolArray | None = None
        self._updated: list[Int64Array] = []
        self._delays: list[Int64Array] = []
        self._delays_of: list[Int64Array] = []
        """Of each layer. [steps, rows]"""

    def begin_layer(self) -> None:
        self._before, self._updated, self._delays = None, [], []

    def add(self, step: Step) -> None:
        stored = step.counts - step.buffered
        self._sums["retrieved"] += int(stored[step.chosen].sum())
        new = step.chosen.copy()
        if (before := self._before) is not None:
            new[:, : before.shape[1]] &= ~before
        self._sums["fetched"] += int(stored[new].sum())
        self._sums["split_loads"] += step.loaded_entries
        self._before = step.chosen
        self._note_delays(step)

    def _note_delays(self, step: Step) -> None:
        """When the clusters that were updated lately are retrieved first. (Numbers that a split
        has given to another half since are taken as the same cluster.)"""
        rows = np.arange(len(step.chosen))
        for back, updated in enumerate(reversed(self._updated[-DELAYS[-1] :])):
            waiting = self._delays[len(self._delays) - 1 - back]
            hit = step.chosen[rows, updated] & (waiting == _NEVER)
            waiting[hit] = back + 1
        self._updated.append(np.maximum(step.cluster_of, ~step.cluster_of))
        self._delays.append(np.full(len(rows), _NEVER, dtype=np.int64))

    def look(self, found: dict[str, float]) -> None:
        self._looks.append(found)

    def end_layer(self, splits: int, loads: int) -> None:
        self._sums["splits"] += splits
        self._sums["loads"] += loads
        self._delays_of.append(np.stack(self._delays))

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        means = {
            name: float(np.mean([found[name] for found in self._looks]))
            for name in (self._looks[0] if self._looks else ())
        }
        return {
            **{f"{name}_entries" if name not in ("loads", "splits") else name: value
               for name, value in self._sums.items()},
            "again": [self._retrieved_within(delay) for delay in DELAYS], **means,
        }  # fmt: skip

    def _retrieved_within(self, delay: int) -> float:
        """Share of the updates whose cluster is retrieved in time, of those with so many steps
        behind them; the first step's count in any case."""
        seen = [layer[: max(1, len(layer) - delay)] for layer in self._delays_of]
        return float((np.concatenate(seen) <= delay).mean())


def _tight_figures(tight: list[list[Tightness]]) -> dict[str, Any]:
    """Means over heads and layers."""
    heads = [one for layer in tight for one in layer]
    return {
        "by_key": float(np.mean([one.by_key for one in heads])),
        "by_cluster": float(np.mean([one.by_cluster for one in heads])),
        "clusters": float(np.mean([one.clusters for one in heads])),
        "largest": max(one.largest for one in heads),
        "by_key_of_layer": [float(np.mean([one.by_key for one in layer])) for layer in tight],
        "clusters_of_layer": [float(np.mean([one.clusters for one in layer])) for layer in tight],
    }
