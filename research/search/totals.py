"""Totals of a request, from the steps that were measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.search.predictions import Prediction
from research.search.variants import SearchCase

QUANTITIES = (
    "seconds", "stall_s", "expand_s", "loaded_bytes", "prefetched_bytes", "written_bytes",
    "copied_bytes",
)  # fmt: skip
Entry = dict[str, Any]
Float64Array = NDArray[np.float64]


def request_totals(
    case: SearchCase, entries: Sequence[Entry], prediction: Prediction, moved: Sequence[Entry] = ()
) -> dict[str, Any]:
    """Time and bytes of the whole request: summed where every step ran to its end (for bytes: or
    moved its blocks), else interpolated.

    Between the places, a quantity per token (time: and group, of which a plan knows the number)
    goes in straight lines over the length of the beams; beyond the outer ones the line goes on.
    Steps in which all beams fit and steps in which they do not have lines of their own, as far as
    both were measured: there is a jump between them.

    Args:
        moved: all steps, moving their blocks and not computed.

    Returns:
        `QUANTITIES`, tokens per second over all beams, shares, and the prediction.
    """
    is_whole = len(entries) == case.num_steps and all(
        entry["tokens"] == case.tokens_of(entry["step"]) for entry in entries
    )
    has_bytes = is_whole or len(moved) == case.num_steps
    totals: dict[str, Any] = {"is_interpolated": not is_whole, "has_all_bytes": has_bytes}
    for name in QUANTITIES:
        if is_whole:
            totals[name] = sum(entry[name] for entry in entries)
        elif has_bytes and name.endswith("_bytes"):
            totals[name] = sum(entry[name] for entry in moved)
        else:
            totals[name] = _interpolated(case, entries, prediction, name)
    totals["decode_s"] = totals["seconds"]
    totals["seconds"] += totals["expand_s"]
    totals["tokens_per_s"] = case.beams * case.new_tokens / totals["seconds"]
    totals["stall_share"] = totals["stall_s"] / totals["seconds"]
    totals["predicted_loaded_bytes"] = prediction.total_bytes
    return totals


def comparison(entries: Sequence[Entry]) -> dict[str, Any]:
    """Predicted and measured bytes of the measured steps, and what full blocks explain of it."""
    measured = sum(entry["loaded_bytes"] for entry in entries)
    predicted = sum(entry["predicted_bytes"] for entry in entries)
    found: dict[str, Any] = {
        "measured_bytes": measured, "predicted_bytes": predicted,
        "percent": 100 * (measured / predicted - 1) if predicted else None,
    }  # fmt: skip
    if entries and entries[0]["full_block_bytes"] is not None:
        blocks = sum(entry["full_block_bytes"] for entry in entries)
        found["full_block_bytes"] = blocks
        found["percent_of_full_blocks"] = 100 * (measured / blocks - 1) if blocks else None
        off = measured - predicted
        found["explained_by_blocks"] = (blocks - predicted) / off if off else None
    return found


def _interpolated(
    case: SearchCase, entries: Sequence[Entry], prediction: Prediction, name: str
) -> float:
    steps, offloads = range(case.num_steps), prediction.offloads
    places = np.array([case.start_of(k) + (case.tokens_of(k) - 1) / 2 for k in steps])
    tokens = np.array([case.tokens_of(k) for k in steps])
    per_group = name == "seconds"
    rates = np.zeros(case.num_steps)
    for there in (False, True):
        chosen = offloads == there
        some = [entry for entry in entries if offloads[entry["step"]] == there] or list(entries)
        if chosen.any():
            rates[chosen] = _line(some, name, places[chosen], per_group=per_group)
    if per_group:
        rates *= prediction.groups
    return float(np.maximum(rates, 0) @ tokens)


def _line(
    entries: Sequence[Entry], name: str, wanted: Float64Array, *, per_group: bool
) -> Float64Array:
    """Straight lines through the places, each the mean of its steps, going on beyond the outer."""
    found: dict[int, list[tuple[float, float]]] = {}
    for entry in entries:
        middle = entry["length"] + (entry["tokens"] - 1) / 2
        divisor = entry["tokens"] * (len(entry["groups"]) if per_group else 1)
        found.setdefault(entry["place"], []).append((middle, entry[name] / divisor))
    x, y = np.array(sorted(tuple(np.mean(some, axis=0)) for some in found.values())).T
    if len(x) == 1:
        return np.full(len(wanted), y[0])
    right = np.clip(np.searchsorted(x, wanted), 1, len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    return np.asarray(y[right - 1] + slope * (wanted - x[right - 1]), dtype=np.float64)
