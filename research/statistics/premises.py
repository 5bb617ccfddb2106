"""A line for each premise of the papers: what they say, and what this model does."""

from collections.abc import Sequence
from typing import Any

from research.statistics.series import column, mean


def premises(figures: dict[str, Any]) -> list[str]:
    """One line for each premise, means over layers, the papers' own figures beside ours.

    Args:
        figures: of a "statistics" result.
    """
    return [
        *_sparsity(figures), *_locality(figures), *_segments(figures), *_rank(figures),
        *_prediction(figures), *_drift(figures),
        "Locality-aware beams: assumes shared prefixes and nothing of attention; not measured.",
    ]  # fmt: skip


def _line(source: str, claim: str, *here: str) -> str:
    return f"{source}: {claim}: {'; '.join(here)}."


def _sparsity(figures: dict[str, Any]) -> list[str]:
    mass = figures["mass"]
    ninety = column(mass["tokens_together"], mass["levels"].index(0.9))
    five, twenty = (column(mass["mass_together"], mass["parts"].index(x)) for x in (0.05, 0.2))
    return [
        _line(
            "KVSwap A.2", "critical entries are less than 5% of the context",
            f"the best 5% hold {_percent(mean(five))} of the probability here",
            f"worst layer {_percent(_least(five))}",
        ),
        _line(
            "HillInfer 3.1", "less than 20% of the tokens influence the output",
            f"the best 20% hold {_percent(mean(twenty))} here",
            f"worst layer {_percent(_least(twenty))}",
            f"90% of the probability is on {_percent(mean(ninety))} of the tokens",
        ),
    ]  # fmt: skip


def _locality(figures: dict[str, Any]) -> list[str]:
    groups, reuse, important = figures["overlap"][-1], figures["reuse"], figures["importance"]
    rates = [_number(mean(column(reuse["hit_rate"], i))) for i in range(len(reuse["sizes"]))]
    told = [f"{rate} at {size:g}x" for rate, size in zip(rates, reuse["sizes"], strict=True)]
    of_80 = reuse["groups_of_80_percent"]
    return [
        _line(
            "KVSwap 3.4.2, figure 8", "critical groups of adjacent steps overlap strongly",
            f"{_number(mean(groups['overlap']))} of {groups['count']} groups here",
            f"random sets {_number(groups['chance'])}",
        ),
        _line(
            "KVSwap 3.4.3, table 5", "the reuse buffer has 0.75 to 0.81 of the groups",
            f"{', '.join(told)} the selection here",
        ),
        _line(
            "KVSwap 3.4.2, figure 8", "fewer than 22% of groups make 80% of the occurrences",
            f"{_percent(mean(of_80['of_selected']))} of those ever selected here",
            f"{_percent(mean(of_80['of_all']))} of all",
        ),
        _line(
            "HillInfer 4.2, figure 8", "some tokens are important at almost all steps",
            f"those of 9 in 10 steps hold {_percent(mean(important['on_stable_tokens']))} of the"
            " places among the best 20% here",
        ),
        _line(
            "HillInfer 4.2, figure 8", "new tokens are very likely to be important",
            f"among the best 20% in {_percent(mean(important['decoded_tokens_important']))} of"
            " the steps behind them here",
        ),
    ]  # fmt: skip


def _segments(figures: dict[str, Any]) -> list[str]:
    queries, largest = figures["queries"], figures["overlap"][-2]
    place = queries["thresholds"].index(0.7)
    lengths = column(queries["segment_tokens"], place)
    inside = mean(column(queries["jaccard_inside"], place))
    between = mean(column(queries["jaccard_between"], place))
    return [
        _line(
            "LouisKV 3.2, figure 3", "critical sets within a segment have a Jaccard above 0.8",
            f"{_number(inside)} within, {_number(between)} across boundaries here (top"
            f" {largest['count']}, threshold 0.7)",
        ),
        _line(
            "LouisKV D.5", "segments of 14 to 18 steps in reasoning, 3 to 6 in document QA",
            f"{_number(mean(lengths), 1)} here",
            f"by layer {_number(_least(lengths), 1)} to {_number(_most(lengths), 1)}",
        ),
    ]  # fmt: skip


def _rank(figures: dict[str, Any]) -> list[str]:
    low = figures["low_rank"]
    lines = []
    for kind, name in (("after_rope", "after RoPE"), ("before_rope", "before RoPE")):
        source = f"KVSwap 3.2, {name}"
        if kind not in low:
            lines.append(_line(source, "left out", "no rotary embedding that can be undone"))
            continue
        told = []
        for place, rank in enumerate(low["ranks"][:3]):
            recall = mean([by_rank[place][-1] for by_rank in low[kind]["recall_together"]])
            energy = mean(column(low[kind]["energy"], place))
            told.append(f"rank {rank} has {_percent(energy)} of the energy, recall"
                        f" {_number(recall)}")  # fmt: skip
        claim = f"joint keys (width {low['width']}) have a low rank; top {low['counts'][-1]} here"
        lines.append(_line(source, claim, *told))
    return lines


def _prediction(figures: dict[str, Any]) -> list[str]:
    found = figures["prediction"]
    recalls = [row[-1] for row in found["recall_together"]]
    worst = _least(recalls)
    if worst is None:
        return [_line("KVSwap 3.3", "left out", "no layer follows one of its own kind")]
    return [
        _line(
            "KVSwap 3.3", "inputs of adjacent layers are similar",
            f"cosine {_number(mean(found['input_cosine']))} here",
            f"predicted query {_number(mean(found['cosine']))}, which finds"
            f" {_number(mean(recalls))} of the top {found['counts'][-1]}",
            f"worst layer {figures['layers'][recalls.index(worst)]}: {_number(worst)}",
        )
    ]  # fmt: skip


def _drift(figures: dict[str, Any]) -> list[str]:
    lines = []
    for kind, name in (("after_rope", "after RoPE"), ("before_rope", "before RoPE")):
        if (parts := figures["drift"].get(kind)) is None:
            continue
        first, last = mean(column(parts, 0)), mean(column(parts, -1))
        farthest = _most([mean(row) for row in parts])
        lines.append(
            _line(
                f"DynaKV 2.3, figure 4, {name}", "decoded keys leave the prompt's clusters",
                f"squared distance {_number(first)} in the first part of the steps,"
                f" {_number(last)} in the last, held-out prompt tokens 1",
                f"farthest layer {_number(farthest)}",
            )
        )  # fmt: skip
    return lines


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
