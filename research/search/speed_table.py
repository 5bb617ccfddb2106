"""The table of `search.speed`: a line for each row, speed-ups, and bytes against the plan."""

from collections.abc import Sequence
from typing import Any

from penstock.core.byte_size import format_bytes
from penstock.evaluate.text_table import format_table
from research.search.variants import BASELINE

Row = dict[str, Any]
_HEADER = (
    "beams, step, variant", "seconds", "tok/s", "gain", "stall", "GiB loaded", "of base",
    "plan off", "GiB written", "groups", "fast GiB", "way",
)  # fmt: skip


def speed_table(rows: Sequence[Row]) -> str:
    """A line for each row, then notes.

    "gain": time of layer-wise offloading over the row's, for the request; "stall": share of the
    time in which the model waited for bytes; "plan off": bytes of the steps that were measured or
    moved against the transfer model; "groups": most in a step; "~": interpolated between places.
    """
    lines: list[list[str]] = []
    for row in rows:
        step = "any" if row["any_step"] else str(row["step_tokens"])
        name = f"{row['beams']:3d}  {step:>4}  {row['variant']}"
        why = row.get("skipped") or row.get("error")
        lines.append([name, why] if why else [name, *_cells(row, baseline_of(rows, row["beams"]))])
    notices = [
        f"{row['beams']} beams, {row['variant']}: {notice}"
        for row in rows for notice in row.get("notices", ())
    ]  # fmt: skip
    parts = [format_table(_HEADER, lines), *dict.fromkeys(notices), *_notes(rows)]
    return "\n".join(parts)


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows that ran."""
    return [row for row in rows if "request" in row]


def baseline_of(rows: Sequence[Row], beams: int) -> Row | None:
    """Layer-wise offloading of so many beams, if it ran."""
    found = [r for r in measured(rows) if (r["beams"], r["variant"]) == (beams, BASELINE)]
    return found[0] if found else None


def gain_of(row: Row, baseline: Row | None) -> float | None:
    """How many times faster a row is than the baseline."""
    if baseline is None:
        return None
    return float(baseline["request"]["seconds"] / row["request"]["seconds"])


def _cells(row: Row, baseline: Row | None) -> list[str]:
    request, compared = row["request"], row.get("compared_moved") or row["compared"]
    sign = "~" if request["is_interpolated"] else ""
    of_bytes = "" if request["has_all_bytes"] else "~"
    gain, share = gain_of(row, baseline), None
    if baseline is not None and baseline["request"]["loaded_bytes"]:
        share = request["loaded_bytes"] / baseline["request"]["loaded_bytes"]
    off = None if compared["percent"] is None else f"{compared['percent']:+.2f} %"
    if off is None:
        off = "none" if not compared["measured_bytes"] else "none planned"
    return [
        sign + f"{request['seconds']:.1f}", f"{request['tokens_per_s']:.0f}",
        "-" if gain is None else f"{gain:.2f}x", f"{request['stall_share']:.1%}",
        of_bytes + _gib(request["loaded_bytes"]), "-" if share is None else f"{share:.2%}",
        off, of_bytes + _gib(request["written_bytes"]),
        str(max(len(entry["groups"]) for entry in row["steps"])),
        f"{row['memory']['used_bytes'] / 2**30:.2f}", row["way"],
    ]  # fmt: skip


def _notes(rows: Sequence[Row]) -> list[str]:
    """What full blocks explain of the baseline's difference, and where the bytes lie."""
    notes = []
    for row in measured(rows):
        compared = row["compared"]
        explained = compared.get("explained_by_blocks")
        if explained is not None and compared["predicted_bytes"] and compared["full_block_bytes"]:
            notes.append(
                f"{row['beams']} beams, {row['variant']}: {compared['percent']:+.2f} % off Eq. 1-3,"
                f" of which full blocks explain {explained:.1%}"
                f" (measured: {compared['measured_bytes'] / compared['full_block_bytes']:.4f} times"
                " Eq. 1-3 of full blocks)"
            )
    for row in measured(rows):
        memory = row["memory"]
        if memory["over_budget"] and memory["used_bytes"] > memory["budget_bytes"]:
            used, budget = format_bytes(memory["used_bytes"]), format_bytes(memory["budget_bytes"])
            notes.append(
                f"{row['beams']} beams, {row['variant']}: takes {used} of fast memory where the "
                f"budget is {budget}"
            )
    stores = dict.fromkeys(row["store"] for row in measured(rows) if row["variant"] == BASELINE)
    stores |= dict.fromkeys(row["store"] for row in measured(rows) if not row["any_step"])
    return [*notes, *(f"slow tier: {store}" for store in stores)]


def _gib(num_bytes: float) -> str:
    size = num_bytes / 2**30
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"
