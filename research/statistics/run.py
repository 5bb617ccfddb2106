"""Statistics: everything that `penstock audit --statistics` measures, step by step and at the end.

What the papers take for granted: attention is sparse (KVSwap, HillInfer), critical sets stay much
the same from step to step (KVSwap, HillInfer, LouisKV), keys have a low rank (KVSwap), the next
layer's query can be told from this layer's input (KVSwap), decoded keys leave the prompt's
clusters (DynaKV). Locality-aware beam scheduling assumes only that beams share prefixes, which is
nothing that attention could refute, so that nothing is measured for it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.evaluate.audit.reference import Counter
from penstock.generation.prompts import PromptBatch
from research.statistics.capture import Step
from research.statistics.keys import key_figures
from research.statistics.layer import BUFFER_SIZES, GROUP_TOKENS, IMPORTANT_PART, LayerMeter
from research.statistics.mass import LEVELS, PARTS
from research.statistics.overlap import concentration, stable_part
from research.statistics.queries import THRESHOLDS, inside_and_between, segment_lengths
from research.statistics.series import Series, mean

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
