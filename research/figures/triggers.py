"""The figure of `trigger_study`: what each trigger captures, over how often it retrieves."""

from typing import Any

from penstock.evaluate.figure_style import INK, SERIES, model_of
from penstock.evaluate.result import Result
from research.figures.chart import PERCENT, Axis, Chart, Panel, line, required, rule
from research.trigger_study.program import family

_LINES = (
    ("gains added up, weighed, keep 2", "lost_mass", "o", SERIES[0], "-"),
    ("stride", "fixed stride", "s", SERIES[1], "-"),
    ("cosine", "cosine of queries (the paper's)", "^", SERIES[2], "-"),
    ("shares moved", "shares among units in use moved", "v", SERIES[3], "-"),
    ("gains added up, truth", "lost_mass, were attention known", "None", INK, ":"),
)
"""Family, name, marker, colour and style."""
_TITLES = {"prose": "prose goes on", "code": "source code goes on", "answer": "its own answer"}


def captured(result: Result) -> Chart:
    """Captured mass over the share of steps that retrieve; a panel for each text."""
    rows = required(result.figures.get("rows"), "nothing was followed")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    panels = [
        Panel(
            title=f"{_TITLES[case]}, {result.figures['cases'][case]['steps']} steps",
            marks=_marks([row for row in rows if row["case"] == case]), grid="both",
            x=Axis(label="steps at which a KV head retrieves", low=0, high=0.75, form=PERCENT),
            y=Axis(label="" if number else "attention captured, outside sinks and window",
                   form=PERCENT),
        )
        for number, case in enumerate(cases)
    ]  # fmt: skip
    budget, tokens = result.settings["budget"], result.settings["tokens"]
    return Chart(
        title=f"LouisKV: when is a new selection due{model_of(result)}?\n{budget} of {tokens:,} "
        "tokens; dashed: every step, and never",
        size=(1.2 + 4.7 * len(panels), 5.2), panels=[panels],
        legend={"ncols": 3, "fontsize": 10},
    )  # fmt: skip


def _marks(rows: list[dict[str, Any]]) -> list[Any]:
    marks: list[Any] = [
        rule(row["captured"], color=INK, linestyle="--", alpha=0.5)
        for row in rows
        if row["trigger"] in ("always", "never") and family(row) in ("always", "never")
    ]
    for name, label, marker, colour, style in _LINES:
        points = sorted((row["share"], row["captured"]) for row in rows if family(row) == name)
        if points:
            x, y = zip(*points, strict=True)
            marks.append(line(list(x), list(y), color=colour, marker=marker, markersize=6,
                              linestyle=style, label=label, zorder=4))  # fmt: skip
    return marks
