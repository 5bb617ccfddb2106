"""What `penstock audit --statistics` prints: two tables by layer, and a line for each premise."""

from collections.abc import Sequence
from typing import Any

from penstock.evaluate.text_table import format_table
from research.statistics.series import column, mean

_LEGEND_LOCALITY = """\
90%: tokens that hold 90% of the probability, of all; per KV head, and heads added (the rest of the
table too). same: tokens or groups of 4 that the step before had as well, of the {counts} most
attended to; random sets: {chances}. reuse: hits of a first-in-first-out buffer of 1, 1.5, 2 and 3
selections. query: cosine with the step before's, after and before RoPE; segment: mean length in
steps at the cosine 0.7."""
_LEGEND_KEYS = """\
rank for 90%: components of the joint keys (of {width}) that hold 90% of their energy. recall
r{rank}: of the {count} top tokens of the layer, found with keys of rank {rank}. inputs: cosine of
the layer's input and the layer before's; predicted: the query made from the latter, its cosine
with the true one, and the top tokens that it finds. drift: squared distance of decoded keys from
the prompt's clusters, in that of held-out prompt tokens: over all steps, in the last of {parts}
parts of them, and over all steps before RoPE."""


def locality_table(figures: dict[str, Any]) -> str:
    """How sparse attention is and how much stays from step to step: a row for each layer."""
    sets, reuse, queries = figures["overlap"], figures["reuse"], figures["queries"]
    names = [f"same {each['count']}" for each in sets[:-1]]
    header = [
        "layer", "90% head", "90%", *names, "same groups",
        *(f"reuse {size:g}x" for size in reuse["sizes"]), "query", "pre-RoPE", "segment",
    ]  # fmt: skip
    place = queries["thresholds"].index(0.7)
    before = queries["cosine_before_rope"] or [None] * len(figures["layers"])
    columns = [
        [_percent(x) for x in column(figures["mass"]["tokens_per_head"], 2)],
        [_percent(x) for x in column(figures["mass"]["tokens_together"], 2)],
        *([_number(x) for x in each["overlap"]] for each in sets),
        *([_number(x) for x in column(reuse["hit_rate"], i)] for i in range(len(reuse["sizes"]))),
        [_number(x) for x in queries["cosine"]],
        [_number(x) for x in before],
        [_number(x, 1) for x in column(queries["segment_tokens"], place)],
    ]
    return _by_layer(header, figures["layers"], columns)


def keys_table(figures: dict[str, Any]) -> str:
    """Rank of keys, prediction and drift: a row for each layer."""
    low, predicted = figures["low_rank"], figures["prediction"]
    count = low["counts"][-1]
    r32 = low["ranks"].index(_shown_rank(low["ranks"]))
    header = [
        "layer", "rank for 90%", "pre-RoPE", f"recall r{low['ranks'][r32]}", "pre-RoPE",
        "inputs", "predicted", f"finds {predicted['counts'][0]}", f"finds {count}", "drift",
        "last part", "pre-RoPE",
    ]  # fmt: skip
    layers = figures["layers"]
    nothing = {"rank_of_energy": [[None]] * len(layers),
               "recall_together": [[[None] * 2] * len(low["ranks"])] * len(layers)}  # fmt: skip
    after, before = low["after_rope"], low.get("before_rope", nothing)
    drifts = figures["drift"]["after_rope"]
    drifts_before = figures["drift"].get("before_rope", [[None]] * len(layers))
    columns = [
        [_number(x, 0) for x in column(after["rank_of_energy"], 0)],
        [_number(x, 0) for x in column(before["rank_of_energy"], 0)],
        [_number(by_rank[r32][-1]) for by_rank in after["recall_together"]],
        [_number(by_rank[r32][-1]) for by_rank in before["recall_together"]],
        [_number(x) for x in predicted["input_cosine"]],
        [_number(x) for x in predicted["cosine"]],
        [_number(row[0]) for row in predicted["recall_together"]],
        [_number(row[-1]) for row in predicted["recall_together"]],
        [_number(mean(parts)) for parts in drifts],
        [_number(parts[-1]) for parts in drifts],
        [_number(mean(parts)) for parts in drifts_before],
    ]
    return _by_layer(header, layers, columns)


def legends(figures: dict[str, Any]) -> tuple[str, str]:
    """What the columns of both tables mean, without line breaks."""
    sets, low = figures["overlap"], figures["low_rank"]
    locality = _LEGEND_LOCALITY.format(
        counts=" or ".join(str(each["count"]) for each in sets[:-1]),
        chances=", ".join(f"{each['chance']:.2f}" for each in sets),
    )
    keys = _LEGEND_KEYS.format(
        width=low["width"], count=low["counts"][-1], rank=_shown_rank(low["ranks"]),
        parts=figures["drift"]["parts"],
    )  # fmt: skip
    return " ".join(locality.split()), " ".join(keys.split())


def _shown_rank(ranks: Sequence[int]) -> int:
    return 32 if 32 in ranks else ranks[0]


def _by_layer(
    header: list[str], layers: Sequence[int], columns: Sequence[Sequence[str]]
) -> str:  # fmt: skip
    rows = [[str(layer), *cells] for layer, *cells in zip(layers, *columns, strict=True)]
    return format_table(header, rows)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    """Two digits that say something."""
    if value is None:
        return "-"
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
