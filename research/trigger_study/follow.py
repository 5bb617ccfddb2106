"""Selections that are made anew where a trigger says so, and what they capture.

All variants of a layer are followed at once: the first dimension is the variant's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from penstock.kernels.unit_selection import renew_units, unit_weights
from research.trigger_study.units import LayerSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One trigger with its threshold."""

    trigger: str
    """One of `TRIGGERS`."""
    threshold: float = 0.0
    keep: float = 1.0
    """See `unit_selection.renew_units`."""
    scores: str = "units"
    """What units are ranked by and gains are told in: one of `SCORES`."""


SCORES = {
    "units": "softmax over units, mean over heads (the paper's); gains are of what units have",
    "sum before": "exponentials of logits over the sum of all that the head attended to in the "
    "step before",
    "weighed": "softmax over units by their tokens, heads weighed by what they had on units in the "
    "step before",
    "truth": "the true attention, which no index knows",
}  # fmt: skip
TRIGGERS = {
    "never": "the first selection stays",
    "always": "every step",
    "stride": "every so many steps",
    "cosine": "cosine of consecutive queries, mean over the layer's heads (the paper's); the "
    "threshold is the share of the steps",
    "centred cosine": "the same, of queries less their mean over all steps",
    "cosine to last": "cosine with the query of the last retrieval",
    "held mass fell": "attention to what is held, against sinks and window, fell by this factor, "
    "in logarithms",
    "shares moved": "total variation of the true shares among held units since the retrieval, "
    "mean over the layer",
    "shares moved, by head": "the same, each KV head by itself",
    "gain": "what a new selection gains by its scores, each KV head by itself",
    "gain by layer": "the same, mean over the layer",
    "gains added up": "the gains of all steps since the retrieval, each KV head by itself; weighed "
    "and with keep 2: LouisKV's lost_mass",
}
_LOST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


def variants() -> list[Variant]:
    """What is followed."""
    found = [Variant(trigger="never")]
    found += [Variant(trigger="always", scores=scores) for scores in SCORES]
    found += [Variant(trigger="always", scores="weighed", keep=keep) for keep in (2.0, 4.0)]
    for steps in (2, 3, 4, 6, 8, 12, 16):
        found.append(Variant(trigger="stride", threshold=steps))
        found.append(Variant(trigger="stride", threshold=steps, keep=2.0, scores="weighed"))
    by_threshold = {
        "cosine": (0.06, 0.125, 0.25, 0.35, 0.5, 0.7),
        "centred cosine": (0.06, 0.125, 0.25, 0.35, 0.5, 0.7),
        "cosine to last": (0.95, 0.9, 0.8, 0.7),
        "held mass fell": (0.05, 0.1, 0.2, 0.4, 0.8),
        "shares moved": (0.1, 0.2, 0.3, 0.4, 0.5),
        "shares moved, by head": (0.1, 0.2, 0.3, 0.4, 0.5),
    }
    found += [
        Variant(trigger=trigger, threshold=threshold)
        for trigger, thresholds in by_threshold.items() for threshold in thresholds
    ]  # fmt: skip
    for scores, factor, keeps in (
        ("units", 4.0, (1.0,)), ("sum before", 1.0, (1.0,)), ("weighed", 1.0, (1.0, 2.0, 3.0)),
        ("truth", 1.0, (1.0,)),
    ):  # fmt: skip
        found += [
            Variant(trigger=trigger, threshold=size * factor * one, scores=scores, keep=keep)
            for trigger, size in (("gain", 0.5), ("gains added up", 1.0))
            for keep in keeps for one in _LOST
        ]  # fmt: skip
    found += [
        Variant(trigger="gain by layer", threshold=0.5 * one, scores="weighed") for one in _LOST
    ]  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of each variant in one layer. float64 [variants]"""

    share: Tensor
    """Steps that retrieve, of all steps and KV heads."""
    fetched: Tensor
    """Tokens read a step, of the budget."""
    captured: Tensor
    """Attention on what is held, of the attention that is not on sinks and window."""
    lost: Tensor
    """Attention on what is neither held nor in sinks and window, of all attention."""


def follow(layer: LayerSteps, budget: int, every: Sequence[Variant]) -> Outcome:
    """Follow all variants through all steps of a layer.

    Args:
        budget: tokens of a selection.
    """
    return _Follower(layer, budget, every).run()


class _Follower:
    def __init__(self, layer: LayerSteps, budget: int, every: Sequence[Variant]) -> None:
        self._layer, self._budget, self._every = layer, budget, every
        device = layer.logits.device
        self._device, self._rows = device, len(layer.sizes)
        self._true = layer.mass.mean(dim=1)
        sizes = layer.sizes.unsqueeze(1)
        logits = layer.logits.masked_fill(sizes == 0, -torch.inf)
        self._paper = torch.softmax(logits, dim=-1).nan_to_num(0.0).mean(dim=1)
        self._sums = torch.logsumexp(logits + sizes.clamp_min(1).log(), dim=-1)
        self._keep = self._tensor([one.keep for one in every])[:, None, None]
        self._threshold = self._tensor([one.threshold for one in every])
        self._place = {
            name: self._tensor([one.trigger == name for one in every]) for name in TRIGGERS
        }
        self._scored = {
            name: self._tensor([one.scores == name for one in every])[:, None, None]
            for name in SCORES
        }
        self._queries = self._cosines()

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _cosines(self) -> dict[str, Tensor]:
        """Whether the layer's cosine is among a variant's lowest. bool [steps, variants]"""
        queries = self._layer.queries
        out = {}
        for name, these in (("cosine", queries), ("centred cosine", queries - queries.mean(0))):
            found = cosine_similarity(these[1:], these[:-1], dim=-1).mean(dim=1)
            limits = torch.quantile(found, self._threshold.clamp(0, 1))
            below = found.unsqueeze(1) < limits
            out[name] = torch.cat([torch.ones_like(below[:1]), below])
        return out

    def run(self) -> Outcome:
        count, steps = len(self._every), self._layer.logits.shape[2]
        self._lost = torch.zeros(count, self._rows, device=self._device)
        self._ref = torch.zeros(count, self._rows, dtype=torch.int64, device=self._device)
        totals: list[Tensor] = []
        held = attended = None
        for step in range(steps):
            sizes = self._layer.sizes[:, step]
            wide = sizes.expand(count, -1, -1)
            scores = self._scores(step, attended)
            if held is None:
                self._then = held = self._select(scores, wide, torch.zeros_like(wide))
            else:
                held = torch.minimum(held, wide)
                new = self._select(scores, wide, held)
                due = self._due(step, scores, held, new)
                fresh = (new - held).clamp_min(0).sum(dim=2) * due
                held = torch.where(due.unsqueeze(2), new, held)
                self._then = torch.where(due.unsqueeze(2), new, self._then)
                self._ref = torch.where(due, step, self._ref)
                self._lost.masked_fill_(due, 0.0)
                got = (held / wide.clamp_min(1) * self._true[:, step]).sum(dim=2)
                outside = self._true[:, step].sum(dim=1)
                totals.append(torch.stack([
                    due.double().mean(dim=1), fresh.double().mean(dim=1) / self._budget,
                    got.double().sum(dim=1) / outside.double().sum(),
                    (outside - got).double().mean(dim=1),
                ]))  # fmt: skip
            parts = held / wide.clamp_min(1)
            seen = torch.einsum("vru,rhu->vrh", parts, self._layer.mass[:, :, step])
            seen = (seen + self._layer.edge[:, :, step]).clamp_min(1e-6)
            attended = self._layer.lse[:, :, step] + seen.log()
        share, fetched, captured, lost = torch.stack(totals).mean(dim=0).cpu()
        return Outcome(share=share, fetched=fetched, captured=captured, lost=lost)

    def _scores(self, step: int, attended: Tensor | None) -> Tensor:
        """Of a token of each unit. float32 [variants, rows, units]

        Args:
            attended: log-sum-exp of what was attended to in the step before.
        """
        paper = self._paper[:, step].expand(len(self._every), -1, -1)
        logits, scored = self._layer.logits[:, :, step], self._scored
        shares = (logits - self._sums[:, :, step].unsqueeze(-1)).exp()
        if attended is None:
            lately = weighed = shares.mean(dim=1).expand_as(paper)
        else:
            lately = (logits - attended.unsqueeze(-1)).clamp_max(0.0).exp().mean(dim=2)
            weights = unit_weights(self._sums[:, :, step - 1], attended)
            weighed = torch.einsum("vrh,rhu->vru", weights, shares) / shares.shape[1]
        true = (self._true[:, step] / self._layer.sizes[:, step].clamp_min(1)).expand_as(paper)
        found = torch.where(scored["sum before"], lately, paper)
        found = torch.where(scored["weighed"], weighed, found)
        found = torch.where(scored["truth"], true, found)
        return found.masked_fill(self._layer.sizes[:, step] == 0, 0.0)

    def _select(self, scores: Tensor, sizes: Tensor, held: Tensor) -> Tensor:
        """Tokens of each unit. int64 [variants, rows, units]"""
        biased = torch.where(held > 0, scores * self._keep, scores)
        flat, sizes = biased.flatten(0, 1), sizes.flatten(0, 1)
        taken = renew_units(flat, sizes, torch.zeros_like(sizes), self._budget, 1.0).taken
        return taken.view(held.shape)

    def _due(self, step: int, scores: Tensor, held: Tensor, new: Tensor) -> Tensor:
        """Which variants' KV heads retrieve. bool [variants, rows]"""
        place, limit = self._place, self._threshold.unsqueeze(1)
        due = torch.zeros(len(self._every), self._rows, dtype=torch.bool, device=self._device)
        due |= place["always"].unsqueeze(1)
        for name, found in self._queries.items():
            due |= (place[name] & found[step]).unsqueeze(1)
        due |= place["stride"].unsqueeze(1) & (step - self._ref >= limit)
        now, then = self._layer.queries[step], self._layer.queries[self._ref[:, 0]]
        turned = cosine_similarity(now.expand_as(then), then, dim=-1).mean(dim=1)
        due |= (place["cosine to last"] & (turned < self._threshold)).unsqueeze(1)
        due |= self._by_attention(step, held)
        gain = (scores * (new - held)).sum(dim=2)
        whole = (scores * self._layer.sizes[:, step]).sum(dim=2).clamp_min(1e-9)
        gain = torch.where(self._scored["units"][:, :, 0], gain / whole, gain)
        self._lost += gain.clamp_min(0.0)
        due |= place["gain"].unsqueeze(1) & (gain > limit)
        due |= place["gain by layer"].unsqueeze(1) & (gain.mean(dim=1, keepdim=True) > limit)
        return due | place["gains added up"].unsqueeze(1) & (self._lost > limit)

    def _by_attention(self, step: int, held: Tensor) -> Tensor:
        """Triggers that see the attention to what is held. bool [variants, rows]"""
        rows = torch.arange(self._rows, device=self._device)
        limit, place = self._threshold.unsqueeze(1), self._place
        sizes = self._layer.sizes
        now = held / sizes[:, step].clamp_min(1) * self._true[:, step]
        then = self._then / sizes[rows, self._ref].clamp_min(1) * self._true[rows, self._ref]
        edge = self._layer.edge.mean(dim=1).clamp_min(1e-6)
        before = then.sum(dim=2) / edge[rows, self._ref]
        fell = (before.clamp_min(1e-9) / (now.sum(dim=2) / edge[:, step]).clamp_min(1e-9)).log()
        moved = now / now.sum(dim=2, keepdim=True).clamp_min(1e-9)
        moved = moved - then / then.sum(dim=2, keepdim=True).clamp_min(1e-9)
        moved = moved.abs().sum(dim=2) / 2
        by_layer = moved.mean(dim=1, keepdim=True)
        return (
            place["held mass fell"].unsqueeze(1) & (fell.mean(dim=1, keepdim=True) > limit)
            | place["shares moved"].unsqueeze(1) & (by_layer > limit)
            | place["shares moved, by head"].unsqueeze(1) & (moved > limit)
        )  # fmt: skip
