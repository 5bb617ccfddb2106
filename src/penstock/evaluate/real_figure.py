"""The figure of suite real: points lost and divergence, a panel for each length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError, StorageError
from penstock.evaluate.accuracy_cells import REFERENCE
from penstock.evaluate.accuracy_settings import short_names
from penstock.evaluate.figure_style import (
    FAINT,
    GRID,
    INK,
    SERIES,
    STYLE,
    model_of,
    short_tokens,
    write_picture,
)
from penstock.evaluate.result import Result

_ROW_INCHES, _PANEL_INCHES, _HEAD_INCHES = 0.34, 6.4, 1.7
_OURS = "kvswap"
_LEAST_KL = 1e-4


def write_real_figure(result: Result, path: Path) -> None:
    """Draw a result of suite real.

    Raises:
        ConfigError: it has no loss to draw.
        StorageError: the file cannot be written.
    """
    with matplotlib.rc_context(STYLE):
        figure = draw_real(result)
        try:
            write_picture(figure, path)
        except OSError as error:
            raise StorageError(f"cannot write the figure to {path}: {error.strerror}") from error


def draw_real(result: Result) -> Figure:
    """Settings down, best first; points lost with their interval, and KL on prose and code beside.

    Raises:
        ConfigError: the result has no loss to draw.
    """
    lengths = list(dict.fromkeys(row["length"] for row in _drawn(result)))
    if not lengths:
        raise ConfigError("there is no loss to draw yet: full attention and a policy must answer")
    rows = {length: [r for r in _drawn(result) if r["length"] == length] for length in lengths}
    most = max(map(len, rows.values()))
    figure = Figure(
        figsize=(2 * _PANEL_INCHES, len(lengths) * (_HEAD_INCHES + most * _ROW_INCHES)),
        layout="constrained",
    )  # fmt: skip
    panels: Any = figure.subplots(len(lengths), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), length in zip(panels, lengths, strict=True):
        ordered = sorted(rows[length], key=lambda row: -row["loss"])
        _losses(left, ordered, f"{short_tokens(length)} tokens{model_of(result)}")
        _divergences(right, ordered, result.figures.get("fidelity", []), length)
    return figure


def _drawn(result: Result) -> list[dict[str, Any]]:
    return [
        row
        for row in result.figures["summary"]
        if row["setting"] != REFERENCE and row["loss"] is not None
    ]


def _losses(panel: Axes, rows: Sequence[dict[str, Any]], title: str) -> None:
    for at, row in enumerate(rows):
        colour = SERIES[0] if row["setting"].startswith(_OURS) else INK
        panel.plot([row["loss_low"], row["loss_high"]], [at, at], color=colour, linewidth=2)
        panel.plot(row["loss"], at, "o", color=colour)
    panel.axvline(0, color=FAINT, linewidth=1)
    panel.set_title(title)
    panel.set_xlabel("points lost to full attention, mean over tasks (95 % interval)")
    _settings_down(panel, list(short_names([row["setting"] for row in rows]).values()))


def _divergences(
    panel: Axes, rows: Sequence[dict[str, Any]], fidelity: Sequence[dict[str, Any]], length: int
) -> None:
    kl = {(one["setting"], one["task"]): one["kl"] for one in fidelity if one["length"] == length}
    for task, mark, name in (
        ("fidelity_prose", "o", "a book"), ("fidelity_code", "s", "source code"),
    ):  # fmt: skip
        points = [(kl.get((row["setting"], task)), at) for at, row in enumerate(rows)]
        found = [(max(value, _LEAST_KL), at) for value, at in points if value is not None]
        if found:
            colour = SERIES[0] if mark == "o" else SERIES[1]
            panel.plot(*zip(*found, strict=True), mark, color=colour, label=name)
    panel.set_xscale("log")
    panel.set_title("KL to full attention, 256 decoded tokens")
    panel.set_xlabel("nats a token (log scale)")
    _settings_down(panel, [""] * len(rows))
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, loc="upper right")


def _settings_down(panel: Axes, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(-0.6, len(names) - 0.4)
    panel.grid(axis="x", color=GRID)
