"""The figure of the study of indexes: mass by bytes, for each model and text."""

from penstock.evaluate.figure_style import FAINT, INK, SERIES
from penstock.evaluate.result import Result
from research.figures.chart import Axis, Chart, Mark, Panel, Row, line, required, rule
from research.index_study.program import mean_of

_SHOWN = {
    "product, keys after RoPE": ("keys after RoPE, 8 bits (KVSwap)", FAINT, "o-"),
    "keys before RoPE": ("keys before RoPE", SERIES[3], ":"),
    "blocks of 64": ("blocks of 64", SERIES[1], "o-"),
    "seen by queries": ("blocks of 64, seen by queries", SERIES[2], "o-"),
    "chosen": ("blocks of 64, seen by queries, mixed bits", SERIES[0], "o-"),
    "product, by blocks": ("the same, Penstock's own", INK, "x"),
    "another text's": ("the same, basis of another text", SERIES[0], "--"),
}
"""What is drawn of each family: its name, colour and line."""


def masses(result: Result) -> Chart:
    """A panel for each model and text; the dashed line is the best that any index can find."""
    models = required(result.figures["models"], "no model was measured")
    panels = [[_panel(model, text) for text in model["texts"]] for model in models]
    width = max(len(row) for row in panels)
    return Chart(
        title="Attention that 100 groups of 4 tokens hold, chosen by each index",
        size=(1.0 + 5.2 * width, 1.6 + 3.6 * len(panels)), panels=panels, share=(True, "row"),
        legend={"ncol": 2},
        ylabel="share of the attention outside of sinks and window",
    )  # fmt: skip


def _panel(model: Row, text: Row) -> Panel:
    curves: dict[str, dict[float, float]] = {}
    for row in text["rows"]:
        curves.setdefault(row["family"], {})[row["size"]] = mean_of(row)
    marks: list[Mark] = [rule(next(iter(curves["oracle"].values())), linestyle="--")]
    for family, (label, colour, style) in _SHOWN.items():
        found = curves.get(family)
        if found:
            at = sorted(found)
            marks.append(line(at, [found[size] for size in at], label=label, color=colour,
                              linestyle=style.lstrip("ox") or "none",
                              marker=style[0] if style[0] in "ox" else None))  # fmt: skip
    title = f"{model['model']}, {text['text']}, {model['tokens']:,} tokens"
    sizes = (8, 16, 32, 64)
    axis = Axis(
        label="bytes a token and layer", log=2, ticks=sizes, names=[str(size) for size in sizes]
    )
    return Panel(marks=marks, title=title, x=axis)
