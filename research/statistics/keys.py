"""Figures of whole keys at the end of a run: their rank before and after RoPE, and their drift."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.evaluate.audit.reference import Counter
from research.statistics.capture import LayerStep, Step
from research.statistics.drift import drift
from research.statistics.low_rank import (
    joined,
    rank_that_holds,
    ranks_up_to,
    recall_of_low_rank,
    spectrum,
)
from research.statistics.rotary import Rotation
from research.statistics.series import plain

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
