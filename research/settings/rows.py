"""Rows of a settings result as figures need them: names, rates, colours, words."""

from collections.abc import Sequence
from typing import Any

from penstock.devices.presets import PRESETS
from penstock.evaluate.result import Result

_OURS, _IN_MEMORY = "kvswap", "full"
_OUR_COLOURS = ("#0b6e99", "#56a8cc", "#123f57")
_OTHERS = (
    "#c96a2b", "#4b8b3b", "#7a4fa3", "#b5375a", "#8c7a1f", "#3d9c98", "#80624d", "#5b616b",
    "#d08bb5", "#9aa83a",
)  # fmt: skip
_MEASURED, _PREDICTED = "whole_model_tokens_per_s", "predicted_tokens_per_s"

SettingRow = dict[str, Any]
"""A row of the result with "name", "rate", "is_predicted" and "budget"."""


def setting_rows(result: Result) -> list[SettingRow]:
    """All rows of a result, each with what figures ask for.

    "name" is the method, with its overlap where the result has several for it; "rate" is tokens per
    second of the whole model, None where nothing is known; "is_predicted" says that the rate was
    not measured but predicted from what the row would read; "budget" is as it was asked for.
    """
    rows = result.figures["rows"]
    overlaps = {(row["method"], row.get("overlap")) for row in rows}
    several = {m for m, _ in overlaps if sum(m == method for method, _ in overlaps) > 1}
    found = []
    for row in rows:
        name = f"{row['method']}, in memory" if row["method"] == _IN_MEMORY else row["method"]
        name = name.replace(":group_tokens=", ", G = ").replace(":", ", ", 1)
        if row["method"] in several and row.get("overlap"):
            name += f", {100 * row['overlap']:.0f} % overlap"
        measured = row.get(_MEASURED)
        found.append({
            **row, "name": name, "rate": measured or row.get(_PREDICTED),
            "is_predicted": not measured, "budget": row.get("budget") or result.settings["memory"],
        })  # fmt: skip
    return found


def names_of(rows: Sequence[SettingRow]) -> list[str]:
    """What is compared, ours first."""
    return sorted(dict.fromkeys(row["name"] for row in rows), key=lambda name: not is_ours(name))


def is_ours(name: str) -> bool:
    """Whether a name is KVSwap's, to stand out."""
    return name.partition(",")[0].startswith(_OURS)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, blue ones for ours."""
    ours = [name for name in names if is_ours(name)]
    others = [name for name in names if not is_ours(name)]
    found = {name: _OUR_COLOURS[i % len(_OUR_COLOURS)] for i, name in enumerate(ours)}
    return found | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def title_lines(result: Result, rows: Sequence[SettingRow]) -> list[str]:
    """What every figure of the result says about how it was measured."""
    settings = result.settings
    simulated = ", simulated devices" if any(row["device"] in PRESETS for row in rows) else ""
    cores = f"on {result.machine['cores']} CPU cores"
    where = f"on {result.machine['gpu']}" if settings.get("on") == "cuda" else cores
    layers, of_layers = settings["layers"], settings.get("of_layers")
    part = f"with {layers} {f'of {of_layers} ' if of_layers else ''}layers "
    whole = layers == of_layers
    budget = budgets_of(rows)
    lines = [
        f"Setting {settings['setting']}: {settings['config']}, KV budget {budget}{simulated}",
        f"measured {where}" if whole else f"measured {part}{where}, reckoned up to the whole model",
    ]
    overlaps = sorted({row["overlap"] for row in rows if row.get("overlap")})
    if overlaps:
        shares = " or ".join(f"{100 * share:.0f} %" for share in overlaps)
        lines.append(f"synthetic selections: {shares} of them as at the step before")
    return lines


def budgets_of(rows: Sequence[SettingRow]) -> str:
    """The budgets of rows that have one, for people."""
    words = dict.fromkeys(budget_words(row["budget"]) for row in rows if row["budget"] != "none")
    return " or ".join(words) or "none"


def budget_words(budget: str) -> str:
    """A budget for people: a share says of what."""
    return f"{budget} of the full cache" if "/" in budget else f"{budget} in all"


def device_title(device: str) -> str:
    """A device for people; the papers' devices are simulated, and say so."""
    return f"{PRESETS[device].title} (simulated)" if device in PRESETS else "this disk"


def short_number(value: float) -> str:
    """Two or three digits: "0.089", "5.2", "46", "1,250"."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
