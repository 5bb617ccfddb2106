"""Tables of settings A and B, and KVSwap's ratio to the best method beside it."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from penstock.core.byte_size import format_bytes
from penstock.evaluate.text_table import format_table
from research.settings.methods import PAPER_BASELINES, UNLIMITED, is_kvswap

RATE = "whole_model_tokens_per_s"


def settings_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case and device, device by device."""
    header = [
        "method", "device (simulated)", "context", "batch", "memory", "tokens/s", "step ms",
        "floor", "predicted", "stall", "hits", "reads/token", "KB/token",
    ]  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda r: (r["device"], r["context"], r["budget"], r["batch"])):
        line = [row["method"], row["device"], str(row["context"]), str(row["batch"])]
        line.append(format_bytes(row["ledger_bytes"]) if row.get("ledger_bytes") else "")
        if row.get(RATE) is None:
            lines.append([*line, row["skipped"] or "not measured"])
            continue
        line += [f"{row[RATE]:.2f}", f"{row['whole_ms']:.0f}"]
        if row.get("predicted_ms") is not None:
            line += [
                f"{row['floor_ms']:.0f}", f"{row['predicted_ms']:.0f}", f"{row['stall_share']:.0%}",
                "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
                f"{row['reads_per_token']:.0f}", f"{row['read_bytes_per_token'] / 1e3:.0f}",
            ]  # fmt: skip
        lines.append(line)
    return format_table(header, lines)


def ratios_of(rows: Sequence[dict[str, Any]], *, same_batch: bool) -> list[dict[str, Any]]:
    """KVSwap's tokens/s over the best retrieval baseline's, case by case.

    Setting A compares rows of one context and batch (`same_batch`), setting B of one context and
    total budget.
    A baseline that was too slow to be run counts with what is predicted from its reads. One of
    another sitting counts with its rate in floors of its own, brought to the floors of KVSwap's
    row: machines differ from sitting to sitting. Without floors, or with another batch, it does not
    count.

    Returns:
        One entry for each case of KVSwap. `ratio` is of the rates as measured within one sitting
        (`of_other_sittings`: which of the best are of others); `by_floors` is the same with each
        step taken in floors of its own, which were decoded before and behind it: it leaves out the
        machine's drift, and has the floors' own noise (None across batches).
    """
    found = []
    for ours in rows:
        if not is_kvswap(ours["method"]) or not ours.get(RATE):
            continue
        rates = [
            (_rate_beside(r, ours), r) for r in rows if _is_beside(r, ours, same_batch)
        ]  # fmt: skip
        beside = [(rate, r) for rate, r in rates if rate]
        if not beside:
            continue
        rate, best = max(beside, key=itemgetter(0))
        of_paper = [(rate, r) for rate, r in beside if r["method"] in PAPER_BASELINES]
        paper_rate, best_of_paper = max(of_paper, key=itemgetter(0), default=(0.0, None))
        found.append({
            "method": ours["method"], "device": ours["device"], "context": ours["context"],
            "batch": ours["batch"], "budget": ours["budget"], "kvswap_tokens_per_s": ours[RATE],
            "best": best["method"], "ratio": ours[RATE] / rate,
            "by_floors": _by_floors(ours, best),
            "of_other_sittings": [
                r["method"] for r in (best, best_of_paper) if r and not _is_one_sitting(r, ours)
            ],
            "best_of_paper": None if best_of_paper is None else best_of_paper["method"],
            "ratio_of_paper":
                None if best_of_paper is None else ours[RATE] / paper_rate,
        })  # fmt: skip
    return found


def _by_floors(ours: dict[str, Any], best: dict[str, Any]) -> float | None:
    if best["batch"] != ours["batch"] or not (best.get("floor_ms") and ours.get("floor_ms")):
        return None
    own = ours["whole_ms"] / ours["floor_ms"]
    return float(best["whole_ms"] / best["floor_ms"] / own)


def _is_beside(row: dict[str, Any], ours: dict[str, Any], same_batch: bool) -> bool:
    if row["method"] in UNLIMITED or is_kvswap(row["method"]):
        return False
    same = ["device", "context", "budget", *(["batch"] if same_batch else [])]
    return all(row[name] == ours[name] for name in same)


def _is_one_sitting(row: dict[str, Any], ours: dict[str, Any]) -> bool:
    return bool(row.get("sitting", 0) == ours.get("sitting", 0))


def _rate_beside(row: dict[str, Any], ours: dict[str, Any]) -> float:
    """A row's tokens per second in the sitting of ours; 0 where that is not known."""
    if _is_one_sitting(row, ours):
        return rate_of(row)
    known = row.get("floor_ms") and ours.get("floor_ms") and row["batch"] == ours["batch"]
    return rate_of(row) * row["floor_ms"] / ours["floor_ms"] if known else 0.0


def rate_of(row: dict[str, Any]) -> float:
    """Tokens per second as measured, or predicted from the row's reads; 0 when neither."""
    return float(row.get(RATE) or row.get("predicted_tokens_per_s") or 0.0)


def ratios_text(ratios: Sequence[dict[str, Any]]) -> str:
    """The smallest and the largest ratio on each device."""
    lines = []
    for device, method in dict.fromkeys((ratio["device"], ratio["method"]) for ratio in ratios):
        mine = [r for r in ratios if (r["device"], r["method"]) == (device, method)]
        for key, name in (("ratio", "best"), ("ratio_of_paper", "best_of_paper")):
            known = [ratio for ratio in mine if ratio[key] is not None]
            if not known:
                continue
            low, high = min(known, key=lambda r: r[key]), max(known, key=lambda r: r[key])
            whose = "all baselines" if key == "ratio" else "the paper's baselines"
            lines.append(
                f"{device} (simulated), {method} over the best of {whose}: "
                f"{low[key]:.2f} ({_where(low, name)}) to {high[key]:.2f} ({_where(high, name)})"
            )
    return "\n".join(lines)


def _where(ratio: dict[str, Any], name: str) -> str:
    other = ", of another sitting, by floors" if ratio[name] in ratio["of_other_sittings"] else ""
    return f"{ratio[name]}, {ratio['context']} tokens, batch {ratio['batch']}{other}"
