"""LayerMeter: what one layer's attention does in a decode step, beside the step before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.evaluate.audit.fidelity import attention_shares
from research.statistics.capture import LayerStep, Step
from research.statistics.low_rank import same_top
from research.statistics.mass import LEVELS, PARTS, mass_of_best, tokens_that_hold
from research.statistics.overlap import group_worth, jaccard, overlap, top_set
from research.statistics.queries import mean_cosine
from research.statistics.reuse import ReuseBuffer

GROUP_TOKENS = 4
"""KVSwap's groups on NVMe (section 3.4.2: "with group size=4")."""
BUFFER_SIZES = (1.0, 1.5, 2.0, 3.0)
"""Of the reuse buffer, in selections."""
IMPORTANT_PART = 0.2
"""HillInfer's "Important" tokens (figure 8: top 20%)."""

Figures = dict[str, Tensor]
"""By name, float64 [batch, figures]; NaN where there is nothing to say."""


class LayerMeter:
    """Measures one layer step by step; keeps the sets of one step and counts."""

    def __init__(
        self, *, batch: int, max_tokens: int, counts: Sequence[int], groups: int
    ) -> None:  # fmt: skip
        """Nothing measured yet.

        Args:
            max_tokens: places of the cache, padding included.
            counts: sizes of the critical sets of tokens.
            groups: groups that are selected.
        """
        self._counts, self._groups = counts, groups
        self._sets: dict[str, Tensor] = {}
        self._past: dict[str, Tensor] = {}
        max_units = max_tokens // GROUP_TOKENS
        self._buffers = [
            ReuseBuffer(batch, round(size * groups), max_units) for size in BUFFER_SIZES
        ]
        self.group_counts = torch.zeros(batch, max_units, dtype=torch.int64)
        """How often each group was selected, steps and rows that count."""
        self.token_counts = torch.zeros(batch, max_tokens, dtype=torch.int64)
        """How often each token was among the most important fifth."""

    def measure(self, layer: LayerStep, step: Step) -> Figures:
        """The figures of one step.

        "_head" is the mean over KV heads that each have a set of their own (query heads of a KV
        head averaged); the rest is of one distribution, probabilities of all heads added.
        """
        shares = _shares(layer, layer.query, step.visible)
        every = torch.cat([shares, shares.mean(dim=1, keepdim=True)], dim=1)
        figures: Figures = {}
        for name, values in (
            ("hold", tokens_that_hold(every, step.visible, LEVELS)),
            ("mass", mass_of_best(every, step.visible, PARTS)),
        ):
            figures |= {f"{name}_head": values[:, :-1].mean(dim=1), name: values[:, -1]}
        figures |= self._compare_sets(every, shares, step)
        figures |= self._compare_queries(layer, step)
        return figures | self._predict(layer, step, shares)

    def _compare_sets(self, every: Tensor, shares: Tensor, step: Step) -> Figures:
        sets = {f"top{count}": top_set(every, step.visible, count) for count in self._counts}
        worth, full = group_worth(shares, step.visible, GROUP_TOKENS)
        sets["groups"] = top_set(worth, full, self._groups)
        figures: Figures = {}
        for name, now in sets.items():
            before = self._sets.get(name)
            pair = (_nothing(now), _nothing(now))
            if before is not None:
                pair = (overlap(before, now), jaccard(before, now))
            for kind, values in zip(("overlap", "jaccard"), pair, strict=True):
                figures[f"{kind}_{name}"] = values[:, -1:]
                if now.shape[1] > 1:
                    figures[f"{kind}_{name}_head"] = values[:, :-1].mean(dim=1, keepdim=True)
        selected = sets["groups"][:, 0].cpu()
        hits = [torch.from_numpy(buffer.take(selected.numpy())) for buffer in self._buffers]
        figures["hits"] = torch.stack(hits, dim=1)
        if not self._sets:  # what fills a buffer for the first time is nobody's miss
            figures["hits"] = figures["hits"].fill_(torch.nan)
        self._sets = sets
        self._count(selected, every[:, -1:], step)
        return figures

    def _count(self, selected: Tensor, together: Tensor, step: Step) -> None:
        live = step.live.cpu()[:, None]
        self.group_counts[:, : selected.shape[1]] += selected & live
        for row, visible in enumerate(step.visible):
            part = max(1, int(IMPORTANT_PART * int(visible.sum())))
            top = top_set(together[row : row + 1], visible[None], part)[0].cpu()
            self.token_counts[row : row + 1, : top.shape[1]] += top & live[row]

    def _compare_queries(self, layer: LayerStep, step: Step) -> Figures:
        now = {"cosine": layer.query}
        if step.rotation is not None:
            plain = step.rotation.off(layer.query.unsqueeze(2), slice(-1, None))
            now["cosine_plain"] = plain.squeeze(2)
        nothing = _nothing(layer.query)[:, :1]
        figures = {"cosine": nothing, "cosine_plain": nothing}
        for name, query in now.items():
            if name in self._past:
                figures[name] = mean_cosine(self._past[name], query).unsqueeze(1)
        self._past = now
        return figures

    def _predict(self, layer: LayerStep, step: Step, shares: Tensor) -> Figures:
        """What a query predicted from the layer before finds.

        Source: KVSwap, section 3.3: X_{i-1} for X_i, layer i's own projections; its premise is that
        the inputs of adjacent layers are similar.

        Differences: exact keys in place of low-rank ones, so that only the query is at fault; sets
        of tokens, the new one among them.
        """
        if layer.predicted is None or layer.input_cosine is None:
            one = _nothing(layer.query)[:, :1]
            wide = one.expand(-1, 2 * len(self._counts))
            return {"predicted": wide, "predicted_cosine": one, "input_cosine": one}
        other = _shares(layer, layer.predicted, step.visible)
        return {
            "predicted": same_top(shares, other, step.visible, self._counts).flatten(1),
            "predicted_cosine": mean_cosine(layer.predicted, layer.query).unsqueeze(1),
            "input_cosine": layer.input_cosine.unsqueeze(1),
        }


def _shares(layer: LayerStep, query: Tensor, visible: Tensor) -> Tensor:
    padding = None if bool(visible.all()) else visible
    return attention_shares(
        query, layer.keys, padding, scaling=layer.scaling, softcap=layer.softcap
    )


def _nothing(like: Tensor) -> Tensor:
    """NaN. float64 [batch, heads]"""
    return torch.full(like.shape[:2], torch.nan, dtype=torch.float64, device=like.device)
