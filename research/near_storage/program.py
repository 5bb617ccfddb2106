"""`python -m research.near_storage placement|agreement`: measured on a recorded decode."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.models.loader import LoadedModel, load
from research.clusters.recording import (
    KeyStream,
    add_recording_options,
    begin_recording,
    facts_of,
    record,
)
from research.near_storage.agreement import measure_agreement
from research.near_storage.placement import (
    decay_settings,
    measure_placement,
    measure_premises,
    settings_of,
)

# Our figures with the paper's beside them ---------------------------------------------------------

PAPER_MOVED = (0.2, 0.5)
"""HillInfer, section 3.2 and figure 4: share of the cache migrated back and forth."""
PAPER_BITS = "HillInfer, section 4.4: raw products in INT8 or INT4, no loss of accuracy"
GOAL = 5.0
"""Times less traffic than naive placement that both ideas together should come to."""
RULE_NAMES = {
    "naive": "naive: the pool is the step's best", "pin": "+ new tokens pinned",
    "selected": "only what is selected comes in, lowest score goes",
    "table": "+ hit table: fewest hits go", "both": "+ hit table and pinning",
}  # fmt: skip
SCORE_NAMES = {
    "products": "products (the paper's)",
    "engine": "attention, cold tokens from codes, hot ones exact",
    "now": "attention, this step's log-sums over everything",
    "hot": "attention, log-sums over the hot pool",
    "hot_ratio": "same, in the ratio of the step before",
    "hot_sample": "same, and one cold token in 16",
    "last": "attention, log-sums of the step before",
    "last_hot": "same, over the hot pool",
}  # fmt: skip


def naive_row(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """The naive placement of the same pools."""
    return next(
        one for one in rows
        if one["rule"] == "naive" and one["hot_share"] == row["hot_share"]
        and one["alpha"] == row["alpha"]
    )  # fmt: skip


def times_less(rows: Sequence[dict[str, Any]], row: dict[str, Any], field: str) -> float:
    """Naive placement's bytes in this row's.

    Args:
        field: "moved_bytes_later" (both ways, as the paper has it) or "sent_bytes_later".
    """
    return float(naive_row(rows, row)[field]) / max(1.0, float(row[field]))


def placement_table(figures: dict[str, Any]) -> str:
    """All tables that the figures are enough for."""
    parts = [_heading(figures)]
    for name, title in (("short_premises", "short"), ("premises", "whole")):
        if name in figures:
            parts.append(_premises(figures[name], title))
    if "rows" in figures:
        parts.append(_rules(figures["rows"]))
    if "decay" in figures:
        parts.append(_decay(figures["decay"]))
    return "\n\n".join(parts)


def agreement_table(figures: dict[str, Any]) -> str:
    """Overlap with the exact choice, by rule and bits; the worst layer in brackets."""
    tops = sorted({row["top"] for row in figures["rows"]}, reverse=True)
    header = ["who is chosen, and how many of them rightly", *(
        f"best {top:.0%}, {'float' if bits == 16 else f'INT{bits}'}"
        for top in tops for bits in (16, 8, 4)
    )]  # fmt: skip
    rows = []
    for name in SCORE_NAMES:
        cells = []
        for top in tops:
            for bits in (16, 8, 4):
                wanted = (name, bits, top)
                found = [row for row in figures["rows"]
                         if (row["rule"], row["bits"], row["top"]) == wanted]  # fmt: skip
                cells.append(
                    f"{found[0]['overlap']:.1%} ({min(found[0]['overlap_of_layer']):.0%})"
                    if found else "-"
                )  # fmt: skip
        rows.append([SCORE_NAMES[name], *cells])
    best = ", ".join(f"{row['mass']:.1%} at {row['top']:.0%}" for row in figures["best_mass"])
    products = [row for row in figures["rows"] if row["rule"] == "products" and row["bits"] < 16]
    same = ", ".join(f"INT{row['bits']} {row['same']:.1%} at {row['top']:.0%}" for row in products)
    return (
        f"{_heading(figures)}\n\n{format_table(header, rows)}\n"
        f"attention on the exact choice: {best}; products against their own float: {same}\n"
        f"hot pool {figures['hot_share']:.0%}, kept by pinning and table; {PAPER_BITS}"
    )


def _heading(figures: dict[str, Any]) -> str:
    return (
        f"{figures['model']}: {figures['prompt_tokens']:,} tokens of prompt, "
        f"{figures['output_tokens']:,} of output ({figures['output']}; the model itself would say "
        f"{figures['expected']:.0%} of them), {len(figures['layers'])} layers, "
        f"{figures['query_heads']} query heads on {figures['kv_heads']} KV heads"
    )


def _premises(found: dict[str, Any], title: str) -> str:
    storage, other = (found[name] for name in ("moved_storage", "moved_any"))
    low, high = PAPER_MOVED
    rows = [
        ["into or out of the last fifth, a step (fig. 4)", f"{_mean(storage):.1%}",
         f"{low:.0%} to {high:.0%}", f"{found['chance_storage']:.0%}"],
        ["into another tier at all, a step", f"{_mean(other):.1%}", "-",
         f"{found['chance_any']:.0%}"],
        ["places among the best held by tokens that always are (fig. 8)",
         f"{found['often_important']:.1%}", "a distinct subset", "0%"],
        ["steps in which a new token is among the best (fig. 8)",
         f"{found['new_important']:.1%}", "extremely likely", "20%"],
    ]  # fmt: skip
    lengths = f"{found['prompt_tokens']:,} + {found['output_tokens']:,} tokens"
    header = [f"{title}: {lengths}, tiers of 20, 60, 20 %", "here", "paper", "by chance"]
    return format_table(header, rows)


def _rules(rows: Sequence[dict[str, Any]]) -> str:
    header = ["hot pool, selected: tokens a step and layer", "read", "demoted", "moved", "less",
              "without known KV", "less", "selected was hot"]  # fmt: skip
    table = []
    for row in rows:
        table.append([
            f"{row['hot_share']:.0%}, {row['alpha']:.0%}  {RULE_NAMES[row['rule']]}",
            f"{row['read_later']:,.1f}", f"{row['demoted_later']['mean']:,.1f}",
            _kib(row["moved_bytes_later"]),
            f"{times_less(rows, row, 'moved_bytes_later'):.2f}x", _kib(row["sent_bytes_later"]),
            f"{times_less(rows, row, 'sent_bytes_later'):.2f}x",
            f"{row['hot_share_of_selected_later']:.1%}",
        ])  # fmt: skip
        if "clairvoyant_later" in row:
            fewest = row["clairvoyant_later"]["mean"]
            naive = naive_row(rows, row)["promoted_later"]["mean"]
            less = f"{naive / fewest:.2f}x" if fewest else "all"
            table.append(["          if the future were known: at least", f"{fewest:,.1f}", "",
                          "", less, "", "", ""])  # fmt: skip
    goal = f"goal: both together move {GOAL:.0f}x less than naive placement"
    return f"{format_table(header, table)}\n{goal}"


def _decay(rows: Sequence[dict[str, Any]]) -> str:
    header = ["hits halved every so many steps (0: never)",
              *(str(row["decay_steps"]) for row in rows)]  # fmt: skip
    promoted = [f"{row['promoted_later']['mean']:,.1f}" for row in rows]
    name = f"promoted, {rows[0]['hot_share']:.0%} hot, {rows[0]['alpha']:.0%} selected"
    return format_table(header, [[name, *promoted]])


def _kib(count: float) -> str:
    return f"{count / 1024:,.1f} KiB"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


# Measured on a recorded decode --------------------------------------------------------------------

KIND = "near_storage"
MEASURES = ("placement", "agreement")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.near_storage", description=__doc__)
    add = parser.add_argument
    add("measure", choices=MEASURES)
    add_recording_options(parser, task="two_walkers", prompt=4096, output=128)
    add("--alphas", default="0.1,0.2", help="shares of the past that a step selects")
    add("--hot", default="0.2,0.4,0.6", help="placement: shares of the past in the hot pool")
    add("--decay", default="0,8,16,32,64,128,256", help="placement: steps after which hits are"
        " halved, measured at --pool and the largest alpha")  # fmt: skip
    add("--pool", type=float, default=0.4, help="the one hot pool of agreement, and of --decay")
    add("--short", type=int, default=0, help="placement: read a prompt of so many tokens too, with"
        " half as many of output (the paper's: 128)")  # fmt: skip
    args = read_options(
        parser, arguments, resume=False, minutes=False,
        renamed_with_out={"--output": "--max-new-tokens"},
    )  # fmt: skip
    if min(args.prompt, args.output, args.chunk) < 1 or args.prompt < 16 or args.output < 2:
        raise ConfigError("--prompt must be at least 16, --max-new-tokens 2 and --chunk 1")
    if not 0 < args.pool <= 1:
        raise ConfigError("--pool is a share above 0 and at most 1")
    if args.short < 0 or 0 < args.short < 16:
        raise ConfigError("--short is 0 for none, or at least 16")
    return args


def shares(text: str, option: str) -> list[float]:
    """Numbers between 0 and 1, ascending.

    Raises:
        ConfigError: they are not.
    """
    found = sorted(real_numbers(text, option))
    if not 0 < found[0] <= found[-1] <= 1:
        raise ConfigError(f"{option} takes shares above 0 and at most 1, not {text}")
    return found


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result."""
    args = parse_arguments(arguments)
    hot, alphas = shares(args.hot, "--hot"), shares(args.alphas, "--alphas")
    decays = sorted(whole_numbers(args.decay, "--decay", least=0, may_be_empty=True))
    if hot[-1] < alphas[0]:
        raise ConfigError("a hot pool must hold what a step selects: --hot is below --alphas")
    torch.manual_seed(args.seed)
    result = begin_recording(KIND, arguments, args)
    result = replace(result, kind=f"{KIND}.{args.measure}")
    loaded = load(args.model)
    stream = record(loaded, args, prompt_tokens=args.prompt, output_tokens=args.output)
    heads, _, dim = stream.keys[0].shape
    result.figures |= {
        **facts_of(stream, args), "query_heads": len(stream.queries[0]), "head_dim": dim,
        "token_bytes": 2 * heads * dim * loaded.model.dtype.itemsize,
        "expected": round(stream.expected, 4),
    }  # fmt: skip

    def save() -> None:
        if args.out:
            result.save(args.out)

    if args.measure == "placement":
        _placement(args, loaded, stream, result.figures, hot, alphas, decays, save)
        return closed(result, args, placement_table(result.figures))
    _agreement(loaded, stream, result.figures, args.pool, alphas)
    return closed(result, args, agreement_table(result.figures))


def _placement(
    args: argparse.Namespace, loaded: LoadedModel, stream: KeyStream, figures: dict[str, Any],
    hot: list[float], alphas: list[float], decays: list[int], save: Callable[[], None],
) -> None:  # fmt: skip
    """Premises, rules and decay, into `figures`; saved after each."""
    token_bytes = int(figures["token_bytes"])
    figures["premises"] = measure_premises(stream)
    if args.short:
        short = record(loaded, args, prompt_tokens=args.short, output_tokens=args.short // 2)
        figures["short_premises"] = measure_premises(short)
    save()
    for name, settings in (
        ("rows", settings_of(hot, alphas)),
        ("decay", decay_settings(args.pool, alphas[-1], decays)),
    ):
        if settings:
            done = Progress(len(stream.keys)).up_to(f"{name}, layers")
            figures[name] = measure_placement(
                stream, settings, token_bytes=token_bytes, on_layer=done
            )
            save()


def _agreement(
    loaded: LoadedModel, stream: KeyStream, figures: dict[str, Any], hot_share: float,
    alphas: list[float],
) -> None:  # fmt: skip
    """Rules, bits and normalisers, into `figures`."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    figures["hot_share"] = hot_share
    figures |= measure_agreement(
        stream, alphas, hot_share=hot_share, dtype=dtype,
        on_layer=Progress(len(stream.keys)).up_to("layers"),
    )  # fmt: skip
