"""What `near_storage placement` and `agreement` print: our figures with the paper's beside them."""

from collections.abc import Sequence
from typing import Any

from penstock.evaluate.text_table import format_table

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
