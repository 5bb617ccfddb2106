"""What rows of settings come to: the best, the pick's share of it, errors, memory, targets."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]

LEAST_SHARE = 0.95
"""Of the best throughput that a pick should reach."""
LEAST_SAVING = 20.0
"""Settings of a sweep for each that the tuner runs."""
MOST_MEDIAN_ERROR, MOST_WORST_ERROR = 0.10, 0.25
LEAST_SETTINGS = 200
TOP = 5
"""Fastest settings that are run again beside pick and best."""


def keeps_all(row: Row, floor: float) -> bool:
    """Whether a setting kept quality, as measured (within the limits where nothing was), and
    stayed within its planned memory."""
    good = row["kl"] <= floor if row.get("kl") is not None else row["within_limits"]
    return bool(good and keeps_memory(row))


def keeps_memory(row: Row) -> bool:
    """Whether a cache never held more than was planned."""
    return bool(row["peak_bytes"] <= row["predicted_bytes"])


def fastest(rows: Iterable[Row], floor: float, count: int = 1) -> list[Row]:
    """The fastest of those that keep quality and memory, fastest first."""
    good = [row for row in rows if keeps_all(row, floor)]
    return sorted(good, key=lambda row: -float(row["tokens_per_s"]))[:count]


def errors_of(rows: Iterable[Row], name: str = "error") -> Row:
    """Relative errors of predicted tokens/s. Median and worst are without sign; "bias" is the
    median with it, positive where too much was predicted."""
    errors = [float(row[name]) for row in rows]
    if not errors:
        return {"count": 0, "median": None, "worst": None, "bias": None}
    sizes = np.abs(errors)
    return {
        "count": len(errors), "median": float(np.median(sizes)), "worst": float(sizes.max()),
        "bias": float(np.median(errors)),
    }  # fmt: skip


def memory_of(rows: Sequence[Row]) -> Row:
    """How many stayed within the memory that was planned, and the most that one took of it."""
    return {
        "held": sum(keeps_memory(row) for row in rows), "of": len(rows),
        "most": max((row["peak_bytes"] / row["predicted_bytes"] for row in rows), default=0.0),
    }  # fmt: skip


def share_of(row: Row | None, best: Row | None) -> float | None:
    """A setting's throughput over another's."""
    if row is None or best is None:
        return None
    return float(row["tokens_per_s"] / best["tokens_per_s"])


def role(rows: Iterable[Row], name: str) -> Row | None:
    """The row of "pick", "best" or "paper"."""
    return next((row for row in rows if name in row["roles"]), None)


def sweep_summary(device: Row, floor: float) -> Row:
    """Of one device of a sweep, see `sweep`: shares, savings, errors, and what met its target."""
    rows, final = device["settings"], device["final"]
    best, again = role(rows, "best"), next(iter(fastest(final, floor)), None)
    tuner, sweep = device["tuner"], device["sweep"]
    pick = role(rows, "pick")
    share = {name: share_of(role(rows, name), best) for name in ("pick", "paper")}
    share_again = {name: share_of(role(final, name), again) for name in ("pick", "paper")}
    errors = errors_of(row for row in rows if not row["of_tuner"])
    memory = memory_of(rows)
    beside = tuner["fidelity_checks"] + tuner.get("surveys", 0)  # older results have none
    saving = sweep["runs"] / (tuner["runs"] + beside)
    return {
        "share": share, "share_again": share_again, "saving": saving,
        "saving_of_steps": sweep["decode_steps"] / max(1, tuner["decode_steps"]),
        "groups": {
            name: None if (row := role(rows, name)) is None else row["group_tokens"]
            for name in ("pick", "best", "paper")
        },
        "pick_keeps_all": pick is not None and keeps_all(pick, floor),
        "errors": errors, "memory": memory,
        "met": {
            "share": (share["pick"] or 0) >= LEAST_SHARE,
            "share_again": (share_again["pick"] or 0) >= LEAST_SHARE,
            "saving": saving >= LEAST_SAVING, "settings": len(rows) >= LEAST_SETTINGS,
            "memory": memory["held"] == memory["of"],
        },
    }  # fmt: skip


def predict_summary(rows: Sequence[Row]) -> Row:
    """Of all configurations and of each device's; and what the clock alone would have said."""
    names = dict.fromkeys(row["device"] for row in rows)
    by_device = {
        name: errors_of(row for row in rows if row["device"] == name) for name in names
    }  # fmt: skip
    errors, memory = errors_of(rows), memory_of(rows)
    met = {
        "median": errors["median"] is not None and errors["median"] <= MOST_MEDIAN_ERROR,
        "worst": errors["worst"] is not None and errors["worst"] <= MOST_WORST_ERROR,
        "memory": memory["held"] == memory["of"],
    }
    return {
        "errors": errors, "by_device": by_device, "clock_errors": errors_of(rows, "clock_error"),
        "memory": memory, "met": met,
    }  # fmt: skip
