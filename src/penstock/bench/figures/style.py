"""How every figure looks, and writing it as SVG and PNG."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from penstock.bench.result import Result

STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110, "savefig.dpi": 160,
    "svg.fonttype": "none", "svg.hashsalt": "penstock", "axes.axisbelow": True,
}  # fmt: skip
"""Settings of matplotlib, for `matplotlib.rc_context`."""
INK, GRID, FAINT = "#30343b", "#e4e6ea", "#8a8f98"
SERIES = ("#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3")
"""Colours of what is compared, our own first."""


def short_setting(text: str) -> str:
    """A setting without its options, for a label: POLICY@BUDGET."""
    return text.partition(":")[0]


def model_of(result: Result) -> str:
    """The measured model's name for a title; older results do not have it."""
    name = result.settings.get("model")
    return f" on {name}" if isinstance(name, str) else ""


def save(figure: Figure, name: str, folder: Path) -> None:
    """Write a figure as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        figure.savefig(folder / f"{name}.{kind}", metadata=metadata)


def short_tokens(tokens: int) -> str:
    """A length as it is spoken of: "16K" for 16,384, "1,000" for what is not in thousands."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"
