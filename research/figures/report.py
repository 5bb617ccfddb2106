"""`python -m research.figures`: figures, drawn from result files and nothing else."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.figure_style import STYLE, save
from penstock.evaluate.real_figure import draw_real
from penstock.evaluate.result import Result
from research.figures import (
    accuracy,
    clusters,
    device_tier,
    hosts,
    index_study,
    louiskv,
    measured,
    near_storage,
    search,
    settings,
    triggers,
    tuning,
)
from research.figures.chart import Chart, draw

RESULTS, FIGURES = Path("benchmarks/results"), Path("benchmarks/figures")
BUNDLED = "recall"
"""The model of results that name none."""


class _Drawn(NamedTuple):
    """A figure of a kind of results."""

    end: str
    """What stands behind the result's name."""
    chart: Callable[[Result], Chart]
    """Raises ConfigError where a result lacks what it shows."""
    has: Callable[[Result], bool] = lambda _: True
    """Whether a result is asked for it."""


def _is_ablation(result: Result) -> bool:
    """Whether one method comes several times at one budget: a dozen of its options are for a
    table, not for bars."""
    texts = dict.fromkeys(cell["setting"] for cell in result.figures.get("cells", []))
    kinds = [text.partition(":")[0] for text in texts]
    return len(set(kinds)) < len(kinds)


def _is_real(result: Result) -> bool:
    """Whether it is of `penstock bench accuracy --suite real`."""
    return result.kind == "accuracy" and result.settings.get("suite") == "real"


def _has_methods(result: Result) -> bool:
    return not _is_ablation(result) and accuracy.compares_methods(result)


def _has_tasks(result: Result) -> bool:
    return not _is_ablation(result) and not accuracy.compares_methods(result)


def _has_front(result: Result) -> bool:
    return not _is_ablation(result) and accuracy.has_front(result)


def _of_ablation(has: Callable[[Result], bool]) -> Callable[[Result], bool]:
    return lambda result: _is_ablation(result) and has(result)


_TABLE: dict[str, tuple[_Drawn, ...]] = {
    "throughput": (_Drawn("", measured.throughput),),
    "audit": (_Drawn("", measured.audit),),
    "documents": (_Drawn("", measured.documents),),
    "statistics": (_Drawn("", measured.statistics),),
    "needles": (_Drawn("", accuracy.needles),),
    "accuracy": (
        _Drawn("-retrievals", louiskv.retrievals, _of_ablation(louiskv.has_retrievals)),
        _Drawn("-units", louiskv.units, _of_ablation(louiskv.has_retrievals)),
        _Drawn("-segments", louiskv.segments, _of_ablation(louiskv.has_retrievals)),
        _Drawn("-budgets", louiskv.token_budgets, _of_ablation(louiskv.has_token_budgets)),
        _Drawn("", accuracy.methods, _has_methods),
        _Drawn("-tasks", accuracy.tasks, _has_tasks),
        _Drawn("-pareto", accuracy.pareto, _has_front),
    ),
    "setting": (_Drawn("", settings.throughput), _Drawn("-breakdown", settings.breakdown)),
    "clusters": (
        _Drawn("", clusters.costs), _Drawn("-drift", clusters.drift),
        _Drawn("-keys", clusters.keys),
    ),
    "clusters.quality": (_Drawn("", clusters.quality),),
    "clusters.end_to_end": (_Drawn("", clusters.speed), _Drawn("-cache", clusters.cache)),
    "near_storage.placement": (
        _Drawn("", near_storage.placement), _Drawn("-counts", near_storage.counts),
    ),
    "near_storage.agreement": (_Drawn("", near_storage.agreement),),
    "near_storage.decode": (_Drawn("", near_storage.decode), _Drawn("-split", near_storage.split)),
    "near_storage.smartssd": (
        _Drawn("", near_storage.smartssd), _Drawn("-split", near_storage.smartssd_split),
        _Drawn("-parts", near_storage.smartssd_parts),
    ),
    "near_storage.memory": (_Drawn("", near_storage.memory),),
    "hosts": (_Drawn("", hosts.tails),),
    "index_study": (_Drawn("", index_study.masses),),
    "search_accuracy": (_Drawn("", search.accuracy),),
    "search.plan": (_Drawn("", search.plan),),
    "search.speed": (
        _Drawn("", search.speedups), _Drawn("-bytes", search.loaded), _Drawn("-time", search.times),
        _Drawn("-stall", search.stalls),
    ),
    "device_tier.kernels": (_Drawn("", device_tier.kernels),),
    "device_tier.speed": (
        _Drawn("", device_tier.speed, lambda result: not result.settings.get("ablation")),
        _Drawn("", device_tier.ablation, lambda result: bool(result.settings.get("ablation"))),
        _Drawn("-breakdown", device_tier.breakdown),
    ),
    "trigger_study": (_Drawn("", triggers.captured),),
    "tuning.predict": (_Drawn("", tuning.predictions),),
    "tuning.sweep": (_Drawn("", tuning.quality), _Drawn("-predicted", tuning.predictions)),
}  # fmt: skip
"""By the kind of a result."""
_IN_PARTS = {"clusters.end_to_end", "hosts", "near_storage.decode", "search.speed"}
"""Kinds whose programs may be asked for so little that no figure comes of it."""


def charts_of(result: Result, name: str) -> dict[str, Chart]:
    """The figures that a result gives, by their names; none for what a table says better, and for
    suite real, whose figure the bench draws itself.

    Args:
        name: of the result's file, without its ending.

    Raises:
        ConfigError: it is of a kind that has figures, and has measured nothing for any.
    """
    found: dict[str, Chart] = {}
    why: ConfigError | None = None
    if _is_real(result):
        return found
    for one in _TABLE.get(result.kind, ()):
        if one.has(result):
            try:
                found[name + one.end] = one.chart(result)
            except ConfigError as error:
                why = why or error
    if why is not None and not found and result.kind not in _IN_PARTS:
        raise why
    return found


def draw_all(paths: Sequence[Path], folder: Path, *, force: bool = False) -> list[str]:
    """Draw what the files have, named after them; returns the figures' names.

    Raises:
        ConfigError: a file is not a result, or has measured nothing.
    """
    names = []
    over_budget: dict[str, list[Result]] = {}
    with matplotlib.rc_context(STYLE):
        for path in paths:
            result = Result.load(path)
            if _is_real(result):
                save(draw_real(result), path.stem, folder, force=force)
                names.append(path.stem)
            charts = charts_of(result, path.stem)
            for name, chart in charts.items():
                save(draw(chart), name, folder, force=force)
                names.append(name)
            if f"{path.stem}-tasks" in charts:
                model = str(result.settings.get("model", BUNDLED))
                over_budget.setdefault(model, [])
                over_budget[model] += [
                    one for one in accuracy.by_length(result) if accuracy.budget_points(one)
                ]
        for model, results in over_budget.items():
            if results:
                name = "accuracy-by-budget" + ("" if model == BUNDLED else f"-{model}")
                save(draw(accuracy.by_budget(results)), name, folder, force=force)
                names.append(name)
    return names


def run(arguments: Sequence[str]) -> list[str]:
    """Draw what the command line asks for; returns the figures' names."""
    parser = argparse.ArgumentParser(prog="python -m research.figures", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help=f"default: {RESULTS}/*.json")
    parser.add_argument("--folder", type=Path, default=FIGURES)
    parser.add_argument(
        "--force", action="store_true", help="replace pictures that do not say Penstock drew them"
    )
    args = parser.parse_args(arguments)
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
