"""The table of `device_tier.speed`: a line for each row, and what LouisKV gains on ArkVale."""

from collections.abc import Sequence
from typing import Any

from penstock.evaluate.text_table import format_table

_HEADER = (
    "pattern, batch, method", "ms/step", "median", "p90", "tok/s", "graph", "retr.", "segment",
    "hits", "MiB/step", "held MiB", "ledger", "peak",
)  # fmt: skip
OURS, OTHERS = "louiskv", ("arkvale", "full-dynamic", "full-static")


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each row; "retr.": share of a layer's steps that retrieve; "held
    MiB": of the GPU, beside the weights, between steps; then what the ledger has booked, and the
    peak of filling and steps."""
    lines: list[list[str]] = []
    for row in rows:
        name = f"{row['pattern']}  {row['batch']:3d}  {row['method']}"
        why = row.get("skipped") or row.get("error")
        lines.append([name, why] if why else [name, *_cells(row)])
    notices = [
        f"{row['pattern']}, batch {row['batch']}, {row['method']}: {notice}"
        for row in rows for notice in row.get("notices", ())
    ]  # fmt: skip
    parts = [format_table(_HEADER, lines), *notices, *ratio_lines(rows), *_breakdown_lines(rows)]
    return "\n".join(part for part in parts if part)


def _cells(row: dict[str, Any]) -> list[str]:
    places, memory = row["places"], row["memory"]

    def mean(name: str) -> float | None:
        found = [place[name] for place in places if place.get(name) is not None]
        return sum(found) / len(found) if found else None

    fetched = mean("fetched_bytes")
    ledger = None if memory["ledger"] is None else memory["ledger"] / 2**20
    return [
        f"{row['answer_mean_ms']:.2f}", _number(mean("median_ms"), 2), _number(mean("p90_ms"), 2),
        f"{row['tokens_per_s']:.0f}", "yes" if row.get("graph") else "no",
        _share(mean("retrieval_share")), _number(mean("mean_segment"), 1),
        _share(mean("hit_rate")), _number(None if fetched is None else fetched / 2**20, 1),
        f"{memory['held'] / 2**20:.0f}", _number(ledger, 0),
        f"{max(memory['step_peak'], memory['fill_peak']) / 2**20:.0f}",
    ]  # fmt: skip


def ratio_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How much faster LouisKV is than each other method, by pattern and batch."""
    rates = {
        (row["pattern"], row["batch"], row["method"].partition(":")[0]): row["tokens_per_s"]
        for row in reversed(rows) if "tokens_per_s" in row and "!" not in row["method"]
    }  # fmt: skip
    lines = []
    for (pattern, batch, method), rate in rates.items():
        if method != OURS:
            continue
        said = [
            f"{rate / rates[pattern, batch, other]:.2f} times {other}"
            for other in OTHERS if (pattern, batch, other) in rates
        ]  # fmt: skip
        if said:
            lines.append(f"{pattern}, batch {batch}: {OURS} is {', '.join(said)}")
    return sorted(lines)


def _breakdown_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        found = row.get("breakdown")
        if found:
            parts = ", ".join(f"{k} {1e3 * v:.0f}" for k, v in found["layer_ms"].items())
            lines.append(
                f"{row['pattern']}, batch {row['batch']}, {row['method']}: us of a layer: {parts}; "
                f"retrieval {found['retrieval_share']:.1%}"
            )
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
