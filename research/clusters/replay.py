"""Decode steps over recorded keys and queries: retrieve, append, split, as Algorithm 1 has it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.unit_selection import unit_scores
from penstock.methods.dynakv.adaptive_clusters import Adaptation, AdaptiveClusters, UpdateRule
from research.clusters.key_stream import KeyStream

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
