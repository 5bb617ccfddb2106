"""What `search_accuracy` prints: accuracy by method and number of beams, and the small memory."""

from collections.abc import Sequence
from typing import Any

from penstock.core.byte_size import format_bytes
from penstock.evaluate.text_table import format_table
from research.search_accuracy.searches import (
    BEST_LOGPROB,
    BEST_VERIFIED,
    GREEDY,
    LOGPROB_SEARCH,
    SINGLE,
    VERIFIED,
)

METHOD_NAMES = {
    VERIFIED: "step-wise search, verifier",
    BEST_VERIFIED: "best of N, verifier",
    LOGPROB_SEARCH: "step-wise search, log-probability",
    BEST_LOGPROB: "best of N, log-probability",
    SINGLE: "a single sample",
    GREEDY: "greedy",
}


def accuracy_tables(figures: dict[str, Any]) -> str:
    """A table for each temperature, the references, and what the small memory changed."""
    parts = []
    for temperature in sorted({row["temperature"] for row in figures["rows"]}):
        rows = [row for row in figures["rows"] if row["temperature"] == temperature]
        count = max(row["documents"] for row in rows)
        parts.append(
            f"whole paths of {figures['hops']} hops right, % (95 % interval): temperature "
            f"{temperature:g}, {count} documents\n\n{_table(rows)}"
        )
    parts += [_reference(row) for row in figures["references"]]
    if figures["small_memory"]:
        parts.append(_small_memory(figures["small_memory"]))
    return "\n\n".join(parts) if parts else "nothing was answered"


def per_cent(row: dict[str, Any]) -> str:
    """Accuracy and its interval, e.g. "85 (71-93)"."""
    accuracy, low, high = (100 * row[name] for name in ("accuracy", "low", "high"))
    return f"{accuracy:.0f} ({low:.0f}-{high:.0f})"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    beams = sorted({row["beams"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = {(row["method"], row["beams"]): per_cent(row) for row in rows}
    return format_table(
        ["beams, or N", *map(str, beams)],
        [[METHOD_NAMES[method], *(cells[method, count] for count in beams)] for method in methods],
    )


def _reference(row: dict[str, Any]) -> str:
    at = f" at temperature {row['temperature']:g}" if row["method"] == SINGLE else ""
    samples = f", {row['samples']} samples" if "samples" in row else ""
    return (
        f"{METHOD_NAMES[row['method']]}{at}: {per_cent(row)} % right, {row['hops']:.1f} hops "
        f"before the first mistake ({row['documents']} documents{samples})"
    )


def _small_memory(found: dict[str, Any]) -> str:
    searches = found["searches"]
    return (
        f"{searches} verified searches of {found['beams']} beams again in "
        f"{format_bytes(found['limit_bytes'])} ({format_bytes(found['full_bytes'])} for all beams, "
        f"{found['store']}): {found['same_answer']} of {searches} answers and {found['same_tree']} "
        f"of {searches} trees the same; up to {found['most_groups']} groups, "
        f"{format_bytes(found['loaded_bytes'])} loaded and "
        f"{format_bytes(found['written_bytes'])} written per search"
    )
