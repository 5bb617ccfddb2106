"""Throughput in KVSwap's setting B: bars, and on each the largest batch that the budget allows."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, GRID, short_tokens
from penstock.evaluate.result import Result
from research.settings.rows import (
    SettingRow,
    budget_words,
    device_title,
    is_ours,
    names_of,
    setting_rows,
    short_number,
    title_lines,
)

_OURS = ("#0b6e99", "#56a8cc", "#a9d3e6")
_OTHERS = ("#7d8792", "#b3bac3", "#d9dde2")
"""By budget, the largest first."""


def draw_best_case(result: Result) -> Figure:
    """A panel for each device and context, a bar for each method and budget.

    Raises:
        ConfigError: nothing was measured.
    """
    every = setting_rows(result)
    rows = [row for row in every if row["rate"]]
    if not rows:
        raise ConfigError("no row of this result was measured")
    devices = list(dict.fromkeys(row["device"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    budgets = list(dict.fromkeys(row["budget"] for row in every))
    fastest_first = sorted(every, key=lambda row: -(row["rate"] or 0.0))
    names = names_of(fastest_first)
    high = 0.9 + (0.12 + 0.22 * len(budgets)) * len(names)
    figure = Figure(figsize=(10.2, 1.3 + high * len(devices)), layout="constrained")
    panels = figure.subplots(
        len(devices), len(contexts), squeeze=False, sharex="row", sharey=True
    )  # fmt: skip
    for line, device in zip(panels, devices, strict=True):
        for axes, context in zip(line, contexts, strict=True):
            here = [r for r in every if (r["device"], r["context"]) == (device, context)]
            _panel(axes, here, names, budgets)
            axes.set_title(f"{device_title(device)}, {short_tokens(context)} tokens")
        line[0].set_xlim(0, 1.4 * max(row["rate"] for row in rows if row["device"] == device))
    for axes in panels[-1]:
        axes.set_xlabel("tokens per second, whole model")
    lines = [*title_lines(result, every), "b: the largest batch that the budget allows"]
    if any(row["is_predicted"] for row in rows):
        lines[-1] += "; about: not run, predicted from what would be read"
    figure.suptitle("\n".join(lines), fontsize=12, x=0.01, ha="left")
    if len(budgets) > 1:
        handles = [
            Patch(color=_OTHERS[number % len(_OTHERS)], label=budget_words(budget))
            for number, budget in enumerate(budgets)
        ]
        figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=3)
    return figure


def _panel(
    axes: Axes, rows: Sequence[SettingRow], names: Sequence[str], budgets: Sequence[str]
) -> None:
    width = 0.84 / len(budgets)
    for number, budget in enumerate(budgets):
        for row_place, name in enumerate(names):
            place = row_place + width * (number - (len(budgets) - 1) / 2)
            mine = [row for row in rows if (row["name"], row["budget"]) == (name, budget)]
            known = [row for row in mine if row["rate"]]
            row = max(known, key=lambda row: row["batch"], default=None)
            rate = 0.0 if row is None else row["rate"]
            text, bold = "does not fit" if mine else "not run", False
            if row is not None:
                about = "about " if row["is_predicted"] else ""
                text, bold = f"{about}{short_number(rate)}  (b = {row['batch']})", is_ours(name)
                shades = _OURS if is_ours(name) else _OTHERS
                axes.barh(
                    place, rate, height=0.92 * width, color=shades[number % len(shades)],
                    hatch="////" if row["is_predicted"] else None, edgecolor="white", linewidth=0,
                )  # fmt: skip
            axes.annotate(
                text, (rate, place), xytext=(5, 0), textcoords="offset points", va="center",
                fontsize=9, fontweight="bold" if bold else "normal",
                color=FAINT if row is None else "black",
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
