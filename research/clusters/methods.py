"""One way to update clusters over a whole stream: how tight they stay, what they find and read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.methods.dynakv.adaptive_clusters import UpdateRule
from research.clusters.key_stream import KeyStream
from research.clusters.replay import BoolArray, Settings, Step, fitted_clusters, replay
from research.clusters.variance import Tightness, global_labels, tightness

LOOK_EVERY = 16
"""Steps between those in which the attention on what was retrieved is told."""
DELAYS = (1, 2, 4, 8, 16)
"""Steps behind an update within which its cluster is retrieved (table 2)."""
_NEVER = 1 << 30

Int64Array = NDArray[np.int64]


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
