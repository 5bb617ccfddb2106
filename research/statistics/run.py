"""Full attention's statistics, step by step and layer by layer."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.evaluate.audit.fidelity import attention_shares
from penstock.evaluate.audit.reference import Counter
from penstock.generation.prompts import PromptBatch
from research.statistics.capture import LayerStep, Step
from research.statistics.keys import key_figures, same_top
from research.statistics.measures import (
    LEVELS,
    PARTS,
    THRESHOLDS,
    ReuseBuffer,
    Series,
    concentration,
    group_worth,
    inside_and_between,
    jaccard,
    mass_of_best,
    mean,
    mean_cosine,
    overlap,
    segment_lengths,
    stable_part,
    tokens_that_hold,
    top_set,
)

# What one layer's attention does in a decode step, beside the step before -------------------------

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
        if not self._sets:  # what fills a buffer for the first time is no miss
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


# Everything that `penstock audit --statistics` measures, step by step and at the end --------------
#
# What the papers take for granted: attention is sparse (KVSwap, HillInfer), critical sets stay much
# the same from step to step (KVSwap, HillInfer, LouisKV), keys have a low rank (KVSwap), the next
# layer's query can be told from this layer's input (KVSwap), decoded keys leave the prompt's
# clusters (DynaKV). Locality-aware beam scheduling assumes only that beams share prefixes, which is
# nothing that attention could refute, so that nothing is measured for it.

SELECTED_TOKENS = 400
"""KVSwap's selection, MG (section 6); of a prompt shorter than 1,600 tokens, a quarter."""
MOST_QUERIES = 16
"""Steps whose queries look for low-rank keys; at most twice as many are kept."""


class Statistics:
    """Measures decode steps of full attention as they come; keeps figures, not attention."""

    def __init__(
        self, shape: KVShape, prompt: PromptBatch, *, top: int, new_tokens: int
    ) -> None:  # fmt: skip
        """Nothing measured yet.

        Args:
            top: tokens of the smaller critical set.
            new_tokens: most decode steps.
        """
        self._shape, self._total = shape, prompt.padded_tokens
        self._lengths = [len(ids) for ids in prompt.token_ids]
        selected = min(SELECTED_TOKENS, max(GROUP_TOKENS, min(self._lengths) // 4))
        self.groups = selected // GROUP_TOKENS
        self.counts = sorted({top, self.groups * GROUP_TOKENS})
        self._meters = [
            LayerMeter(
                batch=len(self._lengths), max_tokens=self._total + new_tokens,
                counts=self.counts, groups=self.groups,
            )
            for _ in range(shape.num_layers)
        ]  # fmt: skip
        self._series = Series()
        self._queries: list[tuple[int, list[Tensor]]] = []
        self._stride = 1
        self._last: Step | None = None

    def add(self, step: Step) -> None:
        """Measure one step."""
        pairs = zip(self._meters, step.layers, strict=True)
        self._series.add(step.live, [meter.measure(layer, step) for meter, layer in pairs])
        if step.number % self._stride == 0:
            self._queries.append((step.number, [layer.query for layer in step.layers]))
        if len(self._queries) > 2 * MOST_QUERIES:
            self._stride *= 2
            self._queries = [kept for kept in self._queries if kept[0] % self._stride == 0]
        self._last = step

    # Figures ----------------------------------------------------------------------------------

    def figures(self, on_layer: Counter = lambda _: None) -> dict[str, Any]:
        """All figures, for JSON; what needs whole keys (rank, drift) is computed here.

        Args:
            on_layer: called after every layer.
        """
        assert self._last is not None, "no step was measured"
        live = self._series.live
        tokens = [length + int(live[:, row].sum()) for row, length in enumerate(self._lengths)]
        return {
            "steps": len(live),
            "counted_steps": int(live.sum()),
            "mass": self._mass(),
            "overlap": self._overlap(mean([float(count) for count in tokens]) or 1.0),
            "reuse": self._reuse(),
            "importance": self._importance(),
            "queries": self._cosines(),
            "prediction": self._prediction(),
            **key_figures(
                self._last,
                live,
                lengths=self._lengths,
                queries=self._queries,
                counts=self.counts,
                shape=self._shape,
                on_layer=on_layer,
            ),
        }

    def _mass(self) -> dict[str, Any]:
        means = self._series.means
        return {
            "levels": LEVELS, "parts": PARTS,
            "tokens_per_head": means("hold_head"), "tokens_together": means("hold"),
            "mass_per_head": means("mass_head"), "mass_together": means("mass"),
        }  # fmt: skip

    def _overlap(self, tokens: float) -> list[dict[str, Any]]:
        """One entry for each kind of set; `chance` is what random sets of the size would have."""
        out = []
        for name, unit, count in (
            *((f"top{count}", 1, count) for count in self.counts),
            ("groups", GROUP_TOKENS, self.groups),
        ):
            entry: dict[str, Any] = {
                "unit_tokens": unit, "count": count, "chance": min(1.0, count * unit / tokens),
                "overlap": self._first(f"overlap_{name}"),
                "jaccard": self._first(f"jaccard_{name}"),
            }  # fmt: skip
            if unit == 1:
                entry["overlap_per_head"] = self._first(f"overlap_{name}_head")
                entry["jaccard_per_head"] = self._first(f"jaccard_{name}_head")
            out.append(entry)
        return out

    def _first(self, name: str) -> list[float | None]:
        return [row[0] for row in self._series.means(name)]

    def _reuse(self) -> dict[str, Any]:
        ever, every = [], []
        for meter in self._meters:
            rows = [
                (counts[counts > 0], there)
                for counts, there in zip(meter.group_counts, self._full_groups(), strict=True)
                if counts.any()
            ]
            ever.append(mean([concentration(counts) for counts, _ in rows]))
            every.append(
                mean([concentration(counts) * len(counts) / there for counts, there in rows])
            )
        return {
            "group_tokens": GROUP_TOKENS, "selected_groups": self.groups, "sizes": BUFFER_SIZES,
            "hit_rate": self._series.means("hits"),
            "groups_of_80_percent": {"of_selected": ever, "of_all": every},
        }  # fmt: skip

    def _full_groups(self) -> list[int]:
        """Groups of each row that could be selected in its last step: full, not all padding."""
        steps = self._series.live.sum(dim=0).tolist()
        return [
            (self._total + count) // GROUP_TOKENS - (self._total - length) // GROUP_TOKENS
            for count, length in zip(steps, self._lengths, strict=True)
        ]

    def _importance(self) -> dict[str, Any]:
        """HillInfer's figure 8: tokens of the most important fifth."""
        live = self._series.live
        stable, newest = [], []
        for meter in self._meters:
            steady, fresh = [], []
            for row, counts in enumerate(meter.token_counts):
                steps = int(live[:, row].sum())
                if not steps:
                    continue
                ages = torch.full_like(counts, steps)
                ages[self._total :] = (steps - torch.arange(len(counts) - self._total)).clamp_min(0)
                steady.append(stable_part(counts, ages))
                fresh.append(float(counts[self._total :].sum()) / float(ages[self._total :].sum()))
            stable.append(mean(steady))
            newest.append(mean(fresh))
        return {
            "part": IMPORTANT_PART, "on_stable_tokens": stable, "decoded_tokens_important": newest,
        }  # fmt: skip

    def _cosines(self) -> dict[str, Any]:
        assert self._last is not None
        known = self._last.rotation is not None
        return {
            "cosine": self._first("cosine"),
            "cosine_before_rope": self._first("cosine_plain") if known else None,
            "thresholds": THRESHOLDS,
            **self._segments("cosine", ""),
            **(self._segments("cosine_plain", "_before_rope") if known else {}),
        }

    def _segments(self, name: str, ending: str) -> dict[str, Any]:
        """Mean lengths by layer and threshold, and likeness of sets within and across."""
        largest = f"jaccard_top{self.counts[-1]}"
        rows = [row for row in range(len(self._lengths)) if self._series.live[:, row].any()]
        lengths: list[list[float | None]] = []
        inside: list[list[float | None]] = []
        between: list[list[float | None]] = []
        for layer in range(self._shape.num_layers):
            cosines = [self._series.of_row(name, layer, row) for row in rows]
            likeness = [self._series.of_row(largest, layer, row) for row in rows]
            line: list[list[float | None]] = [[], [], []]
            for threshold in THRESHOLDS:
                found = [segment_lengths(one, threshold) for one in cosines]
                pairs = [
                    inside_and_between(a, b, threshold)
                    for a, b in zip(likeness, cosines, strict=True)
                ]
                line[0].append(mean([float(n) for one in found for n in one]))
                line[1].append(mean([value for pair in pairs for value in pair[0]]))
                line[2].append(mean([value for pair in pairs for value in pair[1]]))
            for target, values in zip((lengths, inside, between), line, strict=True):
                target.append(values)
        return {
            f"segment_tokens{ending}": lengths, f"jaccard_inside{ending}": inside,
            f"jaccard_between{ending}": between,
        }  # fmt: skip

    def _prediction(self) -> dict[str, Any]:
        found = self._series.means("predicted")
        return {
            "counts": self.counts, "cosine": self._first("predicted_cosine"),
            "input_cosine": self._first("input_cosine"),
            "recall_per_head": [row[0::2] for row in found],
            "recall_together": [row[1::2] for row in found],
        }  # fmt: skip


def measure(
    statistics: Statistics, steps: Iterable[Step], *, on_step: Counter = lambda _: None,
    on_layer: Counter = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Take all steps and return the figures; see `Statistics.figures`."""
    for step in steps:
        statistics.add(step)
        on_step(step.number + 1)
    return statistics.figures(on_layer)
