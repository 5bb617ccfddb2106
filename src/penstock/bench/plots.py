"""`penstock bench report`: figures, drawn from result files and nothing else."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock.bench.method_plots import compares_methods, draw_methods
from penstock.bench.result import Result
from penstock.core.errors import ConfigError, PenstockError

RESULTS, FIGURES = Path("benchmarks/results"), Path("benchmarks/figures")
_STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110, "savefig.dpi": 160,
    "svg.fonttype": "none", "svg.hashsalt": "penstock", "axes.axisbelow": True,
}  # fmt: skip
_COLOURS = {"ours": "#0b6e99", "memory": "#8a8f98", "flexgen": "#c96a2b", "floor": "#b9bec6"}
_MEGA = 1e6


def draw_throughput(result: Result) -> Figure:
    """Step times by row, one panel for each batch size, the floor as a line.

    Raises:
        ConfigError: the result has no measured row.
    """
    rows = [row for row in result.figures["rows"] if row["figures"].get("median_ms")]
    batches = sorted({row["batch"] for row in rows})
    if not rows:
        raise ConfigError("no row of this result was measured")
    most = max(sum(row["batch"] == batch for row in rows) for batch in batches)
    figure = Figure(figsize=(9.5, (0.36 * most + 1.1) * len(batches) + 0.9), layout="constrained")
    panels = figure.subplots(len(batches), 1, squeeze=False)[:, 0]
    for panel, batch in zip(panels, batches, strict=True):
        _throughput_panel(panel, [row for row in rows if row["batch"] == batch])
        panel.set_title(f"batch {batch}", pad=18)
    panels[-1].set_xlabel(
        "time of one decode step, ms (log scale); whiskers: 10th, 90th percentile"
    )
    settings = result.settings
    figure.suptitle(
        f"{settings['config']}, {settings['context']:,} tokens of context, KV budget "
        f"{settings['memory']} of the full cache\n{_machine(result)}",
        fontsize=12,
    )
    return figure


def _throughput_panel(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    rows = rows[::-1]
    places = np.arange(len(rows))
    medians = np.array([row["figures"]["median_ms"] for row in rows])
    low = medians - np.array([row["figures"]["p10_ms"] for row in rows])
    high = np.array([row["figures"]["p90_ms"] for row in rows]) - medians
    panel.set_xscale("log")
    panel.grid(axis="x", which="both", color="#e4e6ea", linewidth=0.7)
    floors = [row["figures"]["median_ms"] for row in rows if row["is_floor"]]
    start = min(medians) / 2
    bars = panel.barh(
        places, medians - start, left=start, height=0.68,
        color=[_colour(row) for row in rows],
        xerr=np.stack([low.clip(0), high.clip(0)]),
        error_kw={"ecolor": "#30343b", "elinewidth": 1.2, "capsize": 2.5},
    )  # fmt: skip
    for bar, row in zip(bars, rows, strict=True):
        if row["simulated"]:
            bar.set_hatch("////")
            bar.set_edgecolor("white")
    for place, row in zip(places, rows, strict=True):
        figures = row["figures"]
        label = f"{figures['median_ms']:,.0f} ms, {figures['tokens_per_s']:.1f} tokens/s"
        panel.annotate(
            label, (figures["p90_ms"], float(place)), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=9.5,
        )  # fmt: skip
    if floors:
        panel.axvline(min(floors), color="#30343b", linestyle=(0, (4, 3)), linewidth=1.1)
        panel.annotate(
            "floor: 400 tokens of context", (min(floors), 1.0), xytext=(4, 1),
            xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=9,
        )  # fmt: skip
    most = max(row["figures"]["p90_ms"] for row in rows)
    wide = most > 100 * start
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(places, [_row_label(row) for row in rows])
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_xlim(start, start * (most / start) ** 1.5)


def _row_label(row: dict[str, Any]) -> str:
    return f"{row['name']}*" if row["synthetic_stream"] else str(row["name"])


def _colour(row: dict[str, Any]) -> str:
    if row["is_floor"]:
        return _COLOURS["floor"]
    if row["name"].startswith("flexgen"):
        return _COLOURS["flexgen"]
    return _COLOURS["ours" if row["name"].startswith("kvswap") else "memory"]


def draw_accuracy(results: Sequence[Result]) -> Figure:
    """Points lost to full attention over the budget, a line for each prompt length."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    colours = ["#0b6e99", "#c96a2b", "#4b8b3b", "#7a4fa3"]
    ticks: dict[float, str] = {}
    for i, result in enumerate(sorted(results, key=lambda r: int(r.settings["tokens"]))):
        points = _budget_points(result)
        if not points:
            continue
        shares = [share for share, _, _, _ in points]
        axes.errorbar(
            shares, [loss for _, loss, _, _ in points],
            yerr=[error for _, _, error, _ in points], marker="o", markersize=6, capsize=3,
            color=colours[i % len(colours)], label=_accuracy_label(result),
        )  # fmt: skip
        ticks |= {share: name for share, _, _, name in points}
    if not ticks:
        raise ConfigError("no result has kvswap at a budget beside full attention")
    axes.axhline(0, color="#30343b", linewidth=0.9)
    axes.annotate(
        "full attention", (1.0, 0), xytext=(0, 5), textcoords="offset points", ha="right",
        xycoords=("axes fraction", "data"), fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"1/{1 / share:.0f}" for share in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlim(max(ticks) * 1.25, min(ticks) / 1.25)
    low, high = axes.get_ylim()
    axes.set_ylim(max(high, 5.0), min(low, -0.8))
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.7)
    axes.set_xlabel("KV memory as a share of the full cache (less memory to the right)")
    axes.set_ylabel("exact match lost, points")
    axes.set_title("What a memory budget costs: KVSwap, mean over the recall tasks")
    axes.legend(frameon=False, loc="lower left")
    return figure


def _budget_points(result: Result) -> list[tuple[float, float, float, str]]:
    """Budget share, loss, its error and name of the plain kvswap settings, largest budget first."""
    points = []
    for summary in result.figures["summary"]:
        name = summary["setting"]
        policy, _, budget = name.partition("@")
        top, slash, bottom = budget.partition("/")
        if policy != "kvswap" or not slash or not bottom.isdigit() or summary["loss"] is None:
            continue
        share = int(top) / int(bottom)
        points.append((share, summary["loss"], summary["loss_error"] or 0.0, name))
    return sorted(points, reverse=True)


def draw_tasks(result: Result) -> Figure:
    """Exact match by task, a bar for each setting."""
    cells = [cell for cell in result.figures["cells"] if cell["scores"]]
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    settings = list(dict.fromkeys(cell["setting"] for cell in cells))
    if not cells:
        raise ConfigError("no cell of this result was measured")
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(settings)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.15, 0.85, len(settings)))
    for i, setting in enumerate(settings):
        at = {cell["task"]: cell for cell in cells if cell["setting"] == setting}
        here = [n for n, task in enumerate(tasks) if task in at]
        values = [100 * float(np.mean(at[tasks[n]]["scores"])) for n in here]
        axes.bar(np.array(here) + (i + 0.5) * width - 0.4, values, width, label=setting,
                 color=shades[i])  # fmt: skip
    axes.set_xticks(range(len(tasks)), [task.replace("_", "\n") for task in tasks], fontsize=9.5)
    axes.set_ylabel("exact match, %")
    axes.set_ylim(0, 104)
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.7)
    axes.set_title(f"Exact match by task, {_accuracy_label(result)}", pad=30)
    axes.legend(frameon=False, ncols=min(4, len(settings)), loc="lower left",
                bbox_to_anchor=(0, 1), fontsize=9.5)  # fmt: skip
    return figure


def _accuracy_label(result: Result) -> str:
    settings = result.settings
    return f"{settings['tokens']:,} tokens, {settings['samples']} samples a task"


def _machine(result: Result) -> str:
    machine = result.machine
    rows = result.figures["rows"]
    real = [row["figures"].get("is_direct") for row in rows if not row["simulated"]]
    direct = " with direct I/O" if True in real and False not in real else ""
    cores = f"{machine['cores']} cores"
    if int(machine["threads"] or 0) < int(machine["cores"] or 0):
        cores = f"{machine['threads']} threads on {machine['cores']} cores"
    where = f"{machine['cpu']}, {cores}, {machine['disk']}{direct}"
    notes = []
    if any(row["simulated"] for row in rows):
        notes.append("hatched: simulated device")
    if any(row["synthetic_stream"] for row in rows):
        notes.append("*: synthetic stream of selections")
    return "\n".join(filter(None, [where, "; ".join(notes)]))


def save(figure: Figure, name: str, folder: Path) -> None:
    """Write a figure as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        figure.savefig(folder / f"{name}.{kind}", metadata=metadata)


def _is_ablation(result: Result) -> bool:
    """Whether settings carry options: a dozen of them are for a table, not for bars."""
    return result.kind == "accuracy" and ":" in str(result.settings.get("settings", ""))


def draw_all(paths: Sequence[Path], folder: Path) -> list[str]:
    """Draw what the files have, ablations excepted, named after them; returns the figures' names.

    Raises:
        ConfigError: a file is not a result, or has nothing to draw.
    """
    names = []
    accuracy: list[Result] = []
    with matplotlib.rc_context(_STYLE):
        for path in paths:
            result = Result.load(path)
            if _is_ablation(result):
                continue
            name = path.stem
            if result.kind == "throughput":
                save(draw_throughput(result), name, folder)
            elif result.kind != "accuracy":
                continue  # a table in a README says it better
            elif compares_methods(result):
                save(draw_methods(result), name, folder)
            else:
                name = f"{name}-tasks"
                save(draw_tasks(result), name, folder)
                accuracy.append(result)
            names.append(name)
        accuracy = [result for result in accuracy if _budget_points(result)]
        if accuracy:
            save(draw_accuracy(accuracy), "accuracy-by-budget", folder)
            names.append("accuracy-by-budget")
    return names


def run(arguments: Sequence[str]) -> list[str]:
    """Draw what the command line asks for; returns the figures' names.

    Raises:
        ConfigError: no result, or one that cannot be drawn.
    """
    parser = argparse.ArgumentParser(prog="penstock bench report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help=f"default: {RESULTS}/*.json")
    parser.add_argument("--folder", type=Path, default=FIGURES)
    args = parser.parse_args(arguments)
    paths = args.files or sorted(RESULTS.glob("*.json"))
    if not paths:
        raise ConfigError(f"there is no result in {RESULTS}; run a benchmark with --out first")
    names = draw_all(paths, args.folder)
    for name in names:
        print(f"{args.folder / name}.svg and .png")
    return names


def main() -> None:
    """Draw; bad input is one line and a non-zero exit."""
    try:
        run(sys.argv[1:])
    except PenstockError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
