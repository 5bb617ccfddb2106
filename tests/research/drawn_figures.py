"""Figures of result files, drawn and not written: `test_plots` looks at what is written."""

from pathlib import Path

from penstock.evaluate.result import Result
from research.figures.chart import draw
from research.figures.report import charts_of


def figures_drawn(*paths: Path) -> list[str]:
    """Draw what result files have; the figures' names."""
    names = []
    for path in paths:
        for name, chart in charts_of(Result.load(path), path.stem).items():
            assert any(axes.has_data() for axes in draw(chart).axes)
            names.append(name)
    return names
