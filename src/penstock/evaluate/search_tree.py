"""The tree of a beam search as a picture: steps to the right, one dot for each candidate."""

import math
from pathlib import Path
from textwrap import wrap

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PathCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Curve

from penstock.core.errors import ConfigError, StorageError
from penstock.evaluate.figure_style import FAINT, INK, STYLE, check_kind, write_picture
from penstock.search.search_tree import SearchNode, SearchOutput

_LABELLED = 48
"""Trees of so few candidates get their scores written in."""
_SCORES = ("#e9d8a6", "#94d2bd", "#0a9396", "#0b6e99", "#1d3557")
"""From the lowest score to the highest."""
_WIN = "#d1495b"
_Places = dict[int | None, tuple[float, float]]
"""Where each node stands, the prompt under None: step from 1 on, and height from 0 to 1."""


def write_search_tree(output: SearchOutput, path: Path, *, model: str) -> None:
    """Draw a search into a file, PNG, SVG or PDF by its ending.

    Raises:
        ConfigError: another ending.
        StorageError: the file cannot be written.
    """
    check_kind(path)
    with matplotlib.rc_context(STYLE):
        figure = draw_search_tree(output, model=model)
        try:
            write_picture(figure, path)
        except OSError as error:
            raise StorageError(f"cannot write the tree to {path}: {error.strerror}") from error


def draw_search_tree(output: SearchOutput, *, model: str) -> Figure:
    """All candidates of a search, coloured by score, with the path to the best answer.

    A column is a step. Children stand in the order of their parents, so that no lines cross; of
    one parent's, the best is on top.

    Raises:
        ConfigError: the search has no candidates.
    """
    if not len(output.tree):
        raise ConfigError("the search has no candidates to draw: it ended before its first step")
    steps = 1 + max(node.step for node in output.tree)
    widest = max(record.num_candidates for record in output.steps)
    figure = Figure(
        figsize=(float(np.clip(3.4 + 0.95 * steps, 7.0, 15.0)), min(3.2 + 0.14 * widest, 10.5)),
        layout="constrained",
    )
    axes = figure.subplots()
    places = _places(output)
    best = output.best
    winners = [] if best is None else output.tree.path(best.node)
    colours = LinearSegmentedColormap.from_list("scores", _SCORES)
    scale = _scale([node.score for node in output.tree])
    size = float(np.clip(2600 / (widest * max(1.0, steps / 12)), 16, 150))
    _lines(axes, output, places, {node.id for node in winners})
    _dots(axes, output, places, size, colours, scale)
    _winning_path(axes, winners, places, size, colours, scale)
    if len(output.tree) <= _LABELLED:
        _write_scores(axes, output, places)
    _frame(figure, axes, output, model, steps)
    bar = figure.colorbar(
        ScalarMappable(scale, colours), ax=axes, pad=0.01, aspect=32, shrink=0.85,
        extend=_beyond([node.score for node in output.tree], scale),
    )  # fmt: skip
    bar.set_label(f"score: {_plain(_score_name(output), 40)}")
    bar.outline.set_visible(False)
    return figure


def _places(output: SearchOutput) -> _Places:
    places: _Places = {None: (0.0, 0.5)}
    column: list[int | None] = [None]
    children: dict[int | None, list[SearchNode]] = {}
    for node in output.tree:
        children.setdefault(node.parent, []).append(node)
    while column:
        nodes = [
            node
            for parent in column
            for node in sorted(children.get(parent, []), key=lambda node: -node.score)
        ]
        for rank, node in enumerate(nodes):
            places[node.id] = (node.step + 1, 1 - (rank + 0.5) / len(nodes))
        column = [node.id for node in nodes]
    return places


def _scale(scores: list[float]) -> Normalize:
    """Colours for nearly all scores; a few strays must not wash out the others."""
    finite = [score for score in scores if math.isfinite(score)] or [0.0]
    low, high = float(np.quantile(finite, 0.05)), max(finite)
    return Normalize(low, high) if high > low else Normalize(low - 0.5, low + 0.5)


def _beyond(scores: list[float], scale: Normalize) -> str:
    assert scale.vmin is not None
    return "min" if any(score < scale.vmin for score in scores) else "neither"


def _curve(start: tuple[float, float], end: tuple[float, float]) -> Curve:
    """From one node to the next, level at both ends."""
    (x0, y0), (x1, y1) = start, end
    middle = (x0 + x1) / 2
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    return Curve([(x0, y0), (middle, y0), (middle, y1), (x1, y1)], codes)


def _lines(axes: Axes, output: SearchOutput, places: _Places, winners: set[int]) -> None:
    for pruned, colour, width in ((True, "#dcdfe4", 0.7), (False, "#8d949e", 1.1)):
        curves = [
            _curve(places[node.parent], places[node.id])
            for node in output.tree
            if (node.fate == "pruned") is pruned and node.id not in winners
        ]
        axes.add_collection(
            PathCollection(
                curves, facecolors="none", edgecolors=colour, linewidths=width,
                zorder=1 if pruned else 2,
            )
        )  # fmt: skip


def _dots(
    axes: Axes, output: SearchOutput, places: _Places, size: float, colours: Colormap,
    scale: Normalize,
) -> None:  # fmt: skip
    for fate, marker, share, alpha in (
        ("pruned", "o", 0.5, 0.35), ("kept", "o", 1.0, 1.0), ("finished", "s", 1.0, 1.0),
    ):  # fmt: skip
        nodes = [node for node in output.tree if node.fate == fate]
        rated = [node for node in nodes if math.isfinite(node.score)]
        axes.scatter(
            [places[node.id][0] for node in rated], [places[node.id][1] for node in rated],
            c=[node.score for node in rated], cmap=colours, norm=scale, s=share * size,
            marker=marker, alpha=alpha, linewidths=0, zorder=3,
        )  # fmt: skip
        refused = [node for node in nodes if not math.isfinite(node.score)]
        axes.scatter(
            [places[node.id][0] for node in refused], [places[node.id][1] for node in refused],
            c=FAINT, s=share * size, marker="x", linewidths=0.8, alpha=0.7, zorder=3,
        )  # fmt: skip


def _winning_path(
    axes: Axes, winners: list[SearchNode], places: _Places, size: float, colours: Colormap,
    scale: Normalize,
) -> None:  # fmt: skip
    if not winners:
        return
    curves = [_curve(places[node.parent], places[node.id]) for node in winners]
    axes.add_collection(
        PathCollection(curves, facecolors="none", edgecolors=_WIN, linewidths=3.0, zorder=4)
    )
    for node in winners:
        axes.scatter(
            *places[node.id], c=[node.score], cmap=colours, norm=scale,
            s=max(1.2 * size, 40),
            marker="s" if node.fate == "finished" else "o", edgecolors=_WIN, linewidths=1.6,
            zorder=5,
        )  # fmt: skip
    x, y = places[winners[-1].id]
    axes.annotate(
        _number(winners[-1].score), (x, y), xytext=(9, 0), textcoords="offset points", va="center",
        color=_WIN, fontweight="bold", fontsize=10, zorder=6,
    )  # fmt: skip


def _write_scores(axes: Axes, output: SearchOutput, places: _Places) -> None:
    last = None if output.best is None else output.best.node
    for node in output.tree:
        if node.id != last:
            axes.annotate(
                _number(node.score), places[node.id], xytext=(0, -13), textcoords="offset points",
                ha="center", fontsize=8, color=FAINT if node.fate == "pruned" else INK, zorder=6,
            )  # fmt: skip


def _frame(figure: Figure, axes: Axes, output: SearchOutput, model: str, steps: int) -> None:
    settings = output.settings
    axes.scatter(0, 0.5, s=90, c=INK, marker="D", zorder=5)
    axes.annotate(
        "prompt", (0, 0.5), xytext=(0, -16), textcoords="offset points", ha="center", fontsize=9,
        color=INK,
    )  # fmt: skip
    axes.set_xlim(-max(0.4, 0.035 * steps), steps + 0.6)
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    every = max(1, round(steps / 15))
    axes.set_xticks(range(every, steps + 1, every))
    until = f", or up to {settings['delimiter']!r}" if settings.get("delimiter") else ""
    axes.set_xlabel(_plain(f"step of at most {settings['step_tokens']} tokens{until}", 80))
    most = int(9.5 * figure.get_figwidth())
    title = wrap(
        f"{_plain(model, most)}: {settings['beams']} beams, width {settings['width']}, scored by "
        f"{_plain(output.scorer, most)}", most,
    )  # fmt: skip
    if output.best is not None and output.best.text.strip():
        lead = f"best answer{' so far' if output.interrupted else ''}: "
        title.append(lead + _plain(output.best.text, most - len(lead)))
    figure.suptitle("\n".join(title), x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK)
    figure.legend(
        handles=_handles(output), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )


def _handles(output: SearchOutput) -> list[Line2D]:
    """What there is in this picture."""

    def dot(label: str, marker: str, colour: str, alpha: float, size: float) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, color=colour, alpha=alpha, markersize=size,
            label=label,
        )  # fmt: skip

    fates = {node.fate for node in output.tree}
    handles = [Line2D([], [], color=_WIN, linewidth=3, label="to the best answer")]
    handles = handles if output.best is not None else []
    if "kept" in fates:
        handles.append(dot("kept", "o", "#0b6e99", 1.0, 7))
    if "finished" in fates:
        handles.append(dot("finished", "s", "#0b6e99", 1.0, 7))
    if "pruned" in fates:
        handles.append(dot("pruned", "o", "#0b6e99", 0.35, 5))
    if any(not math.isfinite(node.score) for node in output.tree):
        handles.append(dot("refused", "x", FAINT, 1.0, 6))
    return handles


def _number(score: float) -> str:
    return f"{score:.3g}".replace("-", "\N{MINUS SIGN}")


def _score_name(output: SearchOutput) -> str:
    return "mean log-probability" if output.scorer == "logprob" else output.scorer


def _plain(text: str, most: int) -> str:
    """One line of at most `most` characters, the end of a longer text; no mathematics in it."""
    line = " ".join(text.split())
    line = line if len(line) <= most else f"… {line[-(most - 2) :]}"
    return line.replace("$", r"\$")
