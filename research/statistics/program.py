"""`python -m research.statistics`: where full attention looks; beside it the papers' premises."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from penstock.evaluate.audit.program import (
    Paced,
    begin,
    headline,
    left_out_lines,
    open_prompts,
    read_prompt_options,
)
from penstock.evaluate.audit.reference import end_token_ids
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.models.model_shape import inspect_model
from research.statistics.capture import full_attention_steps
from research.statistics.measures import column, mean
from research.statistics.run import Statistics, measure

# Two tables by layer, and a line for each premise -------------------------------------------------

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


# What they say, and what this model does ----------------------------------------------------------


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
            f"the best 5% hold {_share_text(mean(five))} of the probability here",
            f"worst layer {_share_text(_least(five))}",
        ),
        _line(
            "HillInfer 3.1", "less than 20% of the tokens influence the output",
            f"the best 20% hold {_share_text(mean(twenty))} here",
            f"worst layer {_share_text(_least(twenty))}",
            f"90% of the probability is on {_share_text(mean(ninety))} of the tokens",
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
            f"{_share_text(mean(of_80['of_selected']))} of those ever selected here",
            f"{_share_text(mean(of_80['of_all']))} of all",
        ),
        _line(
            "HillInfer 4.2, figure 8", "some tokens are important at almost all steps",
            f"those of 9 in 10 steps hold {_share_text(mean(important['on_stable_tokens']))} of the"
            " places among the best 20% here",
        ),
        _line(
            "HillInfer 4.2, figure 8", "new tokens are very likely to be important",
            f"among the best 20% in {_share_text(mean(important['decoded_tokens_important']))} of"
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
            told.append(f"rank {rank} has {_share_text(energy)} of the energy, recall"
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


def _share_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


# Where full attention looks; beside it the papers' premises ---------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.statistics", description=__doc__)
    return read_prompt_options(parser, arguments)


def run(arguments: Sequence[str]) -> Result:
    """Measure full attention alone, print the tables and save the result."""
    args = parse_arguments(arguments)
    result = begin("statistics", arguments, args, policies=[], package="research")
    loaded, prompt, following = open_prompts(args)
    shape = inspect_model(loaded.model)
    reading, decoding = Paced(prompt.padded_tokens), Paced(args.new_tokens)
    ranking = Paced(len(shape.tiered_layers))
    reading.start("full attention reads the prompt")

    def on_prefill(done: int) -> None:
        reading.reach(done)
        if done == prompt.padded_tokens:
            decoding.start("full attention decodes")

    def on_layer(done: int) -> None:
        if done == 0:
            ranking.start("rank and drift of keys, layer by layer")
        ranking.reach(done)

    steps = full_attention_steps(
        loaded, prompt, new_tokens=args.new_tokens, chunk=args.chunk,
        ends=frozenset() if args.past_end else end_token_ids(loaded), following=following,
        on_prefill=on_prefill,
    )  # fmt: skip
    statistics = Statistics(shape.kv, prompt, top=args.top, new_tokens=args.new_tokens)
    result.figures = {
        "prompt_tokens": [len(ids) for ids in prompt.token_ids],
        "layers": list(shape.tiered_layers), "left_out_layers": sorted(shape.windows),
        **measure(statistics, steps, on_step=decoding.reach, on_layer=on_layer),
    }  # fmt: skip
    return closed(result, args, report(result))


def report(result: Result) -> str:
    """The tables of a "statistics" result, and the papers' premises beside its figures."""
    figures = result.figures
    locality, keys = (textwrap.fill(text, 100) for text in legends(figures))
    lines = [textwrap.fill(line, 100, subsequent_indent="  ") for line in premises(figures)]
    return "\n".join(
        [
            headline(result), "", locality_table(figures), "", locality, "", keys_table(figures),
            "", keys, "", *lines, *left_out_lines(figures),
        ]
    )  # fmt: skip
