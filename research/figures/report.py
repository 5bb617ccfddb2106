"""`python -m research.figures`: figures, drawn from result files and nothing else."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.figure_style import STYLE, save
from penstock.evaluate.result import Result
from research.figures.accuracy import budget_points, draw_accuracy, draw_tasks
from research.figures.audit import draw_audit
from research.figures.breakdown import draw_breakdown, has_breakdown
from research.figures.cluster_costs import draw_cluster_costs
from research.figures.cluster_drift import draw_cluster_drift
from research.figures.cluster_keys import draw_cluster_keys
from research.figures.cluster_quality import draw_cluster_quality
from research.figures.cluster_speed import cluster_speed_figures
from research.figures.device_ablation import draw_device_ablation
from research.figures.device_kernels import draw_device_kernels
from research.figures.device_speed import (
    draw_device_breakdown,
    draw_device_speed,
    has_device_breakdown,
)
from research.figures.documents import draw_documents
from research.figures.method import compares_methods, draw_methods
from research.figures.near_agreement import draw_near_agreement
from research.figures.near_counts import draw_near_counts
from research.figures.near_decode import near_decode_figures
from research.figures.near_placement import draw_near_placement
from research.figures.near_smartssd import draw_parts, draw_smartssd, draw_split
from research.figures.needle import draw_needles
from research.figures.pareto import draw_pareto, has_front
from research.figures.result_lengths import by_length
from research.figures.retrieval import draw_retrievals, draw_units
from research.figures.retrieval_points import has_retrievals
from research.figures.search_accuracy import draw_search_accuracy
from research.figures.search_plan import draw_search_plan
from research.figures.search_speed import search_speed_figures
from research.figures.segments import draw_segments
from research.figures.setting import draw_setting
from research.figures.statistics import draw_statistics
from research.figures.throughput import draw_throughput
from research.figures.token_budgets import draw_token_budgets, has_token_budgets
from research.figures.tuning_prediction import draw_predictions
from research.figures.tuning_quality import draw_tuning_quality, has_quality

Draw = Callable[[Result], Figure]
RESULTS, FIGURES = Path("benchmarks/results"), Path("benchmarks/figures")
BUNDLED = "recall"
"""The model of results that name none."""


class _Drawn(NamedTuple):
    """A figure of a kind of results."""

    end: str
    """What stands behind the result's name."""
    draw: Draw
    has: Callable[[Result], bool] = lambda _: True
    """Whether a result has it."""


_DRAWN = {
    "throughput": (_Drawn("", draw_throughput),),
    "audit": (_Drawn("", draw_audit),),
    "statistics": (_Drawn("", draw_statistics),),
    "needles": (_Drawn("", draw_needles),),
    "setting": (_Drawn("", draw_setting), _Drawn("-breakdown", draw_breakdown, has_breakdown)),
    "clusters": (
        _Drawn("", draw_cluster_costs), _Drawn("-drift", draw_cluster_drift),
        _Drawn("-keys", draw_cluster_keys),
    ),
    "clusters.quality": (_Drawn("", draw_cluster_quality),),
    "near_storage.placement": (
        _Drawn("", draw_near_placement), _Drawn("-counts", draw_near_counts),
    ),
    "near_storage.agreement": (_Drawn("", draw_near_agreement),),
    "near_storage.smartssd": (
        _Drawn("", draw_smartssd), _Drawn("-split", draw_split), _Drawn("-parts", draw_parts),
    ),
    "search_accuracy": (_Drawn("", draw_search_accuracy),),
    "search.plan": (_Drawn("", draw_search_plan),),
    "device_tier.kernels": (_Drawn("", draw_device_kernels),),
    "device_tier.speed": (
        _Drawn("", draw_device_speed, lambda result: not result.settings.get("ablation")),
        _Drawn("", draw_device_ablation, lambda result: bool(result.settings.get("ablation"))),
        _Drawn("-breakdown", draw_device_breakdown, has_device_breakdown),
    ),
    "documents": (_Drawn("", draw_documents),),
    "tuning.predict": (_Drawn("", draw_predictions),),
    "tuning.sweep": (
        _Drawn("", draw_tuning_quality, has_quality), _Drawn("-predicted", draw_predictions),
    ),
    "ablation": (
        _Drawn("-retrievals", draw_retrievals, has_retrievals),
        _Drawn("-units", draw_units, has_retrievals),
        _Drawn("-segments", draw_segments, has_retrievals),
        _Drawn("-budgets", draw_token_budgets, has_token_budgets),
    ),
    "accuracy": (
        _Drawn("", draw_methods, compares_methods),
        _Drawn("-tasks", draw_tasks, lambda result: not compares_methods(result)),
        _Drawn("-pareto", draw_pareto, has_front),
    ),
}  # fmt: skip
"""By the kind of a result."""
_BY_ROWS: dict[str, Callable[[Result, str], dict[str, Draw]]] = {
    "clusters.end_to_end": cluster_speed_figures, "near_storage.decode": near_decode_figures,
    "search.speed": search_speed_figures,
}  # fmt: skip
"""Kinds whose figures have names of their own."""


def figures_of(result: Result, name: str) -> dict[str, Draw]:
    """The figures that a result gives, by their names; none for what a table says better.

    Args:
        name: of the result's file, without its ending.
    """
    if result.kind in _BY_ROWS:
        return _BY_ROWS[result.kind](result, name)
    kind = "ablation" if _is_ablation(result) else result.kind
    return {name + one.end: one.draw for one in _DRAWN.get(kind, ()) if one.has(result)}


def _is_ablation(result: Result) -> bool:
    """Whether one method comes several times at one budget: a dozen of its options are for a
    table, not for bars."""
    if result.kind != "accuracy":
        return False
    texts = dict.fromkeys(cell["setting"] for cell in result.figures.get("cells", []))
    kinds = [text.partition(":")[0] for text in texts]
    return len(set(kinds)) < len(kinds)


def draw_all(paths: Sequence[Path], folder: Path, *, force: bool = False) -> list[str]:
    """Draw what the files have, named after them; returns the figures' names.

    Raises:
        ConfigError: a file is not a result.
    """
    names = []
    over_budget: dict[str, list[Result]] = {}
    with matplotlib.rc_context(STYLE):
        for path in paths:
            result = Result.load(path)
            figures = figures_of(result, path.stem)
            for name, draw in figures.items():
                save(draw(result), name, folder, force=force)
                names.append(name)
            if draw_tasks in figures.values():
                model = str(result.settings.get("model", BUNDLED))
                over_budget.setdefault(model, [])
                over_budget[model] += [one for one in by_length(result) if budget_points(one)]
        for model, results in over_budget.items():
            if results:
                name = "accuracy-by-budget" + ("" if model == BUNDLED else f"-{model}")
                save(draw_accuracy(results), name, folder, force=force)
                names.append(name)
    return names


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.figures", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help=f"default: {RESULTS}/*.json")
    parser.add_argument("--folder", type=Path, default=FIGURES)
    parser.add_argument(
        "--force", action="store_true", help="replace pictures that do not say Penstock drew them"
    )
    return parser.parse_args(arguments)


def run(arguments: Sequence[str]) -> list[str]:
    """Draw what the command line asks for; returns the figures' names.

    Raises:
        ConfigError: no result, or one that cannot be drawn.
    """
    args = parse_arguments(arguments)
    paths = args.files or sorted(RESULTS.glob("*.json"))
    if not paths:
        raise ConfigError(f"there is no result in {RESULTS}; run a benchmark with --out first")
    names = draw_all(paths, args.folder, force=args.force)
    for name in names:
        print(f"{args.folder / name}.svg and .png")
    if not names:
        print("these results have no figure: a table says it better (the command that made one "
              "prints it)")  # fmt: skip
    return names


if __name__ == "__main__":
    run_program(run)
