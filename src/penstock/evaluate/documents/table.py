"""What `documents` prints."""

from statistics import median
from typing import Any

from penstock.core.byte_size import format_bytes
from penstock.evaluate.result import Result
from penstock.evaluate.text_table import format_table

Row = dict[str, Any]


def speedup(row: Row) -> float:
    """How many times sooner a reopened document's first token is there than a new cache's."""
    times = [float(each["first_token_s"]) for each in row["opens"]]
    return float(row["fresh_first_token_s"]) / median(times)


def documents_table(result: Result) -> str:
    """A table for each part that was measured."""
    figures = result.figures
    makers = {"reopen": _reopen, "encryption": _encryption, "verify": _verify}
    return "\n\n".join(make(figures[part]) for part, make in makers.items() if part in figures)


def _reopen(rows: list[Row]) -> str:
    header = (
        "tokens", "prefill s", "first token s", "reopened s", "sooner", "opening reads",
        "same answers", "right", "prefilled again", "document grew",
    )  # fmt: skip
    lines = []
    for row in rows:
        first = median(each["first_token_s"] for each in row["opens"])
        lines.append([
            f"{row['tokens']:,}", f"{row['fresh_prefill_s']:.1f}",
            f"{row['fresh_first_token_s']:.1f}", f"{first:.2f}", f"{speedup(row):.0f}x",
            format_bytes(row["opens"][0]["opened_bytes"]),
            f"{row['same_answers']}/{row['questions']}", f"{row['right_answers']}",
            f"{row['prefilled_tokens']:,}", format_bytes(row["grown_bytes"]),
        ])  # fmt: skip
    return format_table(header, lines)


def _encryption(rows: list[Row]) -> str:
    header = ("unit", "random MB/s", "with a key", "share", "verify MB/s", "with a key", "share")
    lines = []
    for row in rows:
        cells = [format_bytes(row["unit_bytes"])]
        for kind in ("random_bytes_per_s", "verify_bytes_per_s"):
            plain, sealed = (median(row[kind][name]) for name in ("plain", "encrypted"))
            cells += [f"{plain / 1e6:,.0f}", f"{sealed / 1e6:,.0f}", f"{sealed / plain:.0%}"]
        lines.append(cells)
    return format_table(header, lines)


def _verify(rows: list[Row]) -> str:
    header = ("store", "unit", "plain reading MB/s", "verify MB/s", "share")
    lines = []
    for row in rows:
        plain, checked = (
            median(row[name]) for name in ("sequential_bytes_per_s", "verify_bytes_per_s")
        )
        lines.append([
            format_bytes(row["total_bytes"]), format_bytes(row["unit_bytes"]),
            f"{plain / 1e6:,.0f}", f"{checked / 1e6:,.0f}", f"{checked / plain:.0%}",
        ])  # fmt: skip
    return format_table(header, lines)
