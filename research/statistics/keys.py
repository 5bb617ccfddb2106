"""Keys of full attention: how low their rank is, and how far they drift."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.evaluate.audit.fidelity import attention_shares
from penstock.evaluate.audit.reference import Counter
from penstock.kernels.kmeans import kmeans, nearest
from research.statistics.capture import LayerStep, Rotation, Step
from research.statistics.measures import overlap, plain, top_set

# Energy of singular values, and the keys that they find -------------------------------------------


def spectrum(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors of keys, all heads of a token joined.

    Source: KVSwap, section 3.2: SVD of the flattened keys, N x (heads * dim), without centring.

    Differences: the paper's basis comes from other text; this one comes from the prompt's own
    keys, the best that any basis of this rank can do on them.

    Args:
        keys: [tokens, width]

    Returns:
        Each component's share of the energy (squared singular values), largest first, [width], and
        the vectors as columns, [width, width]; float64 both.
    """
    flat = keys.double()
    values, vectors = torch.linalg.eigh(flat.T @ flat)
    energy = values.flip(0).clamp_min(0.0)
    return energy / energy.sum(), vectors.flip(1)


def ranks_up_to(width: int) -> list[int]:
    """16, 32, 64, ... and the width itself."""
    ranks, rank = [], 16
    while rank < width:
        ranks.append(rank)
        rank *= 2
    return [*ranks, width]


def rank_that_holds(energy: Tensor, level: float) -> int:
    """The smallest rank that holds a share of the energy. energy: as `spectrum` gives it."""
    return int((energy.cumsum(dim=0) < level - 1e-9).sum()) + 1


def joined(keys: Tensor) -> Tensor:
    """Keys with all heads of a token side by side: [kv_heads, tokens, dim] to [tokens, width]."""
    return keys.transpose(0, 1).flatten(1)


def recall_of_low_rank(
    queries: Sequence[tuple[Tensor, int]], exact: Tensor, rebuilt: Tensor, *,
    counts: Sequence[int], scaling: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The share of the true top tokens among the top tokens of other keys, for one sequence.

    Source: KVSwap, Eq. 1: logits of the low-rank keys, K A A^T, in place of those of K.

    Args:
        queries: post-RoPE queries of some steps, [num_heads, dim], and the tokens of each.
        exact: post-RoPE keys. [kv_heads, tokens, dim]
        rebuilt: what stands in for them, alike.
        counts: sizes of the sets of top tokens.

    Returns:
        For each size: the mean over KV heads of sets of their own, and of one set for all heads
        (probabilities added). The mean over steps, 0 to 1. float64 [sizes, 2]
    """
    found = torch.zeros(len(counts), 2, dtype=torch.float64)
    for query, tokens in queries:
        true, other = (
            attention_shares(
                query[None], keys[None, :, :tokens], None, scaling=scaling, softcap=softcap
            )
            for keys in (exact, rebuilt)
        )
        visible = torch.ones(1, tokens, dtype=torch.bool, device=true.device)
        found += same_top(true, other, visible, counts)[0].cpu()
    return found / len(queries)


def same_top(true: Tensor, other: Tensor, visible: Tensor, counts: Sequence[int]) -> Tensor:
    """The share of the top tokens of one attention among those of another.

    Args:
        true: see `attention_shares`. [batch, kv_heads, tokens]
        other: alike.
        visible: False at padding. bool [batch, tokens]
        counts: sizes of the sets.

    Returns:
        For each size: each KV head's own set, the mean, and one set for all heads. float64
        [batch, sizes, 2]
    """
    both = [torch.cat([each, each.mean(dim=1, keepdim=True)], dim=1) for each in (true, other)]
    out = []
    for count in counts:
        wanted, found = (top_set(each, visible, count) for each in both)
        shares = overlap(found, wanted)
        out.append(torch.stack([shares[:, :-1].mean(dim=1), shares[:, -1]], dim=1))
    return torch.stack(out, dim=1)


# How far keys of decoded tokens lie from the prompt's clusters, as decoding goes on ---------------

CLUSTER_TOKENS = 16
"""Mean size of a cluster (LouisKV, section 5.1; DynaKV names none)."""
FITTED_TOKENS = 8192
"""Most tokens of the prompt that are clustered."""
HELD_OUT = 8
"""One of so many tokens of the prompt is kept out of the clustering."""
_ITERATIONS = 10
_ELEMENTS = 1 << 22


def squared_distances(points: Tensor, centroids: Tensor) -> Tensor:
    """Squared distance of each point from the nearest centroid.

    Args:
        points: [sets, points, dim]
        centroids: [sets, clusters, dim]

    Returns:
        float32 [sets, points]
    """
    index = nearest(points, centroids, cosine=False, elements=_ELEMENTS)
    own = centroids.float().gather(1, index.unsqueeze(-1).expand(*index.shape, points.shape[-1]))
    return (points.float() - own).square().sum(dim=-1)


def held_out(tokens: int, seed: int) -> Tensor:
    """One of `HELD_OUT` tokens, drawn: every eighth would all be alike in a text with a rhythm.

    Args:
        tokens: at least 2.

    Returns:
        At least one True and one False. bool [tokens]
    """
    drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[drawn[: max(1, tokens // HELD_OUT)]] = True
    return mask


def drift(keys: Tensor, prompt_tokens: int, *, seed: int = 0) -> Tensor:
    """Squared distances of decoded keys from the prompt's centroids, in units of the prompt's own.

    Source: DynaKV, section 2.3 and figure 4: "newly generated entries may be distant from all
    existing clusters", so that a static update raises the variance within clusters (table 5).

    Differences: the paper shows a projection and names no distance. Here clusters are k-means of
    the prompt's keys, per KV head, and stay as they are; the unit is the mean squared distance of
    prompt tokens that took no part in the clustering (`held_out`), because those that did are
    nearer to their centroids for that reason alone. 1 means no drift: a decoded token is as
    far from the clusters as any other token of the prompt.

    Post-RoPE keys turn with the position, and decoded tokens are at positions that no prompt token
    had: part of their distance. Pre-RoPE keys tell the rest.

    Args:
        keys: [kv_heads, prompt tokens + decoded tokens, dim]
        prompt_tokens: at least 2.

    Returns:
        The mean over KV heads, for each decoded token. float64 [decoded tokens]
    """
    stride = -(-prompt_tokens // FITTED_TOKENS)
    prompt = keys[:, :prompt_tokens][:, ::stride]
    kept_out = held_out(prompt.shape[1], seed).to(keys.device)
    fitted = prompt[:, ~kept_out]
    clusters = max(1, fitted.shape[1] // CLUSTER_TOKENS)
    centroids = kmeans(
        fitted, clusters, iterations=_ITERATIONS, cosine=False, seed=seed, elements=_ELEMENTS
    )
    unit = squared_distances(prompt[:, kept_out], centroids).double().mean(dim=1, keepdim=True)
    found = squared_distances(keys[:, prompt_tokens:], centroids).double()
    return (found / unit.clamp_min(1e-30)).mean(dim=0)


# Their rank before and after RoPE, and their drift ------------------------------------------------

LEVELS = (0.9, 0.95, 0.99)
"""Shares of the energy for which ranks are told."""
DRIFT_PARTS = 8
"""Parts of the decode steps in which drift is told; fewer when there are fewer steps."""

Queries = Sequence[tuple[int, Sequence[Tensor]]]
"""Some steps: their number, and the queries of each layer, [batch, num_heads, head_dim]."""


def key_figures(
    last: Step, live: Tensor, *, lengths: Sequence[int], queries: Queries, counts: Sequence[int],
    shape: KVShape, on_layer: Counter,
) -> dict[str, Any]:  # fmt: skip
    """Rank and drift of each layer's keys, the mean over the rows of a batch.

    Args:
        last: the last step, which has all keys.
        live: the steps of each row that count. bool [steps, batch]
        lengths: tokens of each row's prompt.
        queries: what looks for low-rank keys.
        counts: sizes of the sets of top tokens.
        on_layer: called with 0, and after every layer.
    """
    ranks = ranks_up_to(shape.joint_dim)
    kinds: dict[str, Rotation | None] = {"after_rope": None}
    if last.rotation is not None:
        kinds["before_rope"] = last.rotation
    low: dict[str, Any] = {
        "ranks": ranks, "width": shape.joint_dim, "levels": LEVELS, "counts": list(counts),
        **{kind: {} for kind in kinds},
    }  # fmt: skip
    drifts: dict[str, list[Any]] = {kind: [] for kind in kinds}
    steps = [int(count) for count in live.sum(dim=0)]
    parts = min(DRIFT_PARTS, min(count for count in steps if count))
    total = last.visible.shape[1] - len(live)
    on_layer(0)
    for number, layer in enumerate(last.layers):
        found: dict[str, list[dict[str, Tensor]]] = {kind: [] for kind in kinds}
        for row, count in enumerate(steps):
            if not count:
                continue
            first = total - lengths[row]
            keys = layer.keys[row, :, first : total + count]
            asked = [
                (kept[number][row], lengths[row] + step + 1)
                for step, kept in queries
                if live[step, row]
            ]
            for kind, rotation in kinds.items():
                turn = None if rotation is None else rotation.row(row, first)
                one = _Row(keys, lengths[row], turn, asked, layer)
                found[kind].append({**one.rank(ranks, counts), "drift": one.drift(parts)})
        for kind, rows in found.items():
            for name in rows[0]:
                mean = torch.stack([each[name] for each in rows]).mean(dim=0)
                target = drifts[kind] if name == "drift" else low[kind].setdefault(name, [])
                target.append(_nested(mean))
        on_layer(number + 1)
    return {"low_rank": low, "drift": {"parts": parts, **drifts}}


@dataclass(frozen=True)
class _Row:
    """One sequence's keys in one layer, without padding."""

    keys: Tensor
    """Post-RoPE, the prompt's first. [kv_heads, tokens, head_dim]"""
    prompt_tokens: int
    turn: Rotation | None
    """What is taken off the keys before their rank is looked at."""
    queries: Sequence[tuple[Tensor, int]]
    layer: LayerStep

    def _source(self) -> Tensor:
        """Keys before or after RoPE. float32 [kv_heads, tokens, head_dim]"""
        if self.turn is None:
            return self.keys.float()
        return self.turn.off(self.keys[None], slice(0, self.keys.shape[1]))[0]

    def drift(self, parts: int) -> Tensor:
        """Means over equal parts of the decode steps, see `drift`. [parts]"""
        found = drift(self._source(), self.prompt_tokens)
        return torch.stack([part.mean() for part in found.tensor_split(parts)]).cpu()

    def rank(self, ranks: Sequence[int], counts: Sequence[int]) -> dict[str, Tensor]:
        """Energy by rank, ranks by energy, and recall by rank and set."""
        heads, tokens, _ = self.keys.shape
        flat = joined(self._source())
        energy, basis = spectrum(flat[: self.prompt_tokens])
        basis = basis.float()
        components = flat @ basis
        recalls = []
        for rank in ranks:
            rebuilt = components[:, :rank] @ basis[:, :rank].T
            keys = rebuilt.view(tokens, heads, -1).transpose(0, 1)
            if self.turn is not None:
                keys = self.turn.on(keys[None], slice(0, tokens))[0]
            recall = recall_of_low_rank(
                self.queries, self.keys, keys, counts=counts, scaling=self.layer.scaling,
                softcap=self.layer.softcap,
            )  # fmt: skip
            recalls.append(recall)
        found = torch.stack(recalls)
        held = energy.cumsum(dim=0).cpu()
        return {
            "energy": held[[rank - 1 for rank in ranks]],
            "rank_of_energy": torch.tensor([float(rank_that_holds(energy, x)) for x in LEVELS]),
            "recall_per_head": found[..., 0],
            "recall_together": found[..., 1],
        }


def _nested(values: Tensor) -> list[Any]:
    return plain(values) if values.dim() == 2 else plain(values[None])[0]
