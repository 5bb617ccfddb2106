"""Retrieval counts and their figures: the right number at the right place."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_cells import Cell, accuracy_table
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.result import Result
from penstock.evaluate.retrieval_counts import (
    LENGTHS,
    Counts,
    RetrievalWatch,
    add_counts,
    retrieving_share,
)
from research.figures import louiskv
from research.figures.chart import draw
from research.figures.louiskv import compared, has_retrievals
from tests.research.drawn_figures import figures_drawn

LOUIS = "louiskv:selected_tokens={},window_tokens=64,sink_tokens=4,{}"


def watched(*layers: list[list[int]], steps: list[int], untold: int = 0) -> Counts | None:
    """Counts of layers whose boundaries are given step by step, a column for each sequence; before
    the first of them are `untold` steps."""
    made = [SimpleNamespace(index=SimpleNamespace(observer=None)) for _ in layers]
    cache: Any = SimpleNamespace(tiers=SimpleNamespace(layers=[SimpleNamespace(), *made]))
    watch = RetrievalWatch(cache)
    for layer, decisions in zip(made, layers, strict=True):
        for position, decision in enumerate(decisions):
            boundary = np.array(decision, dtype=np.bool_)
            layer.index.observer(100 + position, boundary, boundary)
    return watch.counts(steps, 100 - untold)


def test_counts_by_hand() -> None:
    """Two layers and two sequences, of which the second ends after three of five steps."""
    counts = watched(
        [[1, 1], [0, 1], [0, 0], [1, 1], [0, 1]],
        [[1, 1], [1, 0], [0, 0], [1, 0], [1, 0]],
        steps=[5, 3],
    )
    assert counts == {
        "steps": [8, 8], "retrievals": [4, 5], "segments": [4, 5], "segment_tokens": [8, 8],
        "both": [3], "either": [6],
        # First layer: 3, 2 and 1, 2; second: 1, 2, 1, 1 and 3.
        "lengths": [4, 3, 2, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip
    assert retrieving_share(counts) == 9 / 16
    doubled = add_counts(counts, counts)
    assert doubled is not None
    assert doubled["retrievals"] == [8, 10]
    assert add_counts(None, counts) == counts
    assert retrieving_share(None) is None


def test_steps_that_told_nothing_are_steps() -> None:
    """Two steps attended to everything; the second sequence ends with the third, the first step
    that told something."""
    counts = watched([[1, 1], [0, 1], [1, 0]], steps=[5, 3], untold=2)
    assert counts is not None
    assert (counts["steps"], counts["retrievals"]) == ([3 + 1], [2 + 1])
    assert (counts["segments"], counts["segment_tokens"]) == ([3], [4])


def test_nothing_to_observe() -> None:
    assert watched(steps=[3]) is None


def counted(share: float) -> Counts:
    """Of two layers with 100 steps each; the first layer retrieves 20 times more."""
    found = [round(100 * share) + 10, round(100 * share) - 10]
    lengths = [found[0], 0, found[1], *[0] * (len(LENGTHS) - 2)]
    return {
        "steps": [100, 100], "retrievals": found, "segments": found,
        "segment_tokens": [100, 100], "both": [found[1]], "either": [found[0]],
        "lengths": lengths,
    }  # fmt: skip


def ablation() -> Result:
    """Scores and shares that are all different: no two settings can be swapped unseen."""
    rows: list[tuple[str, float, float | None]] = [("full", 1.0, None)]
    for budget, less in ((256, 0.04), (512, 0.0)):
        rows += [
            (f"quest:selected_tokens={budget}", 0.9 - less, None),
            (f"arkvale:selected_tokens={budget}", 0.88 - less, None),
            (LOUIS.format(budget, "tau=0.6"), 0.4 - less, 0.3),
            (LOUIS.format(budget, "tau=0.8"), 0.8 - less, 0.5),
            (LOUIS.format(budget, "boundaries=stride:2"), 0.6 - less, 0.52),
            (LOUIS.format(budget, "boundaries=every"), 0.96 - less, 0.9),
            (LOUIS.format(budget, "boundaries=every,units=pages"), 0.5 - less, 0.9),
        ]
    cells = [
        {"length": 4096, "task": task, "setting": setting, "scores": [score - worse] * 4,
         "retrieval": None if share is None else counted(share)}
        for setting, score, share in rows for task, worse in (("one", 0.0), ("two", 0.02))
    ]  # fmt: skip
    # A task that one setting did not get to says nothing about any of them.
    cells.append(cells[0] | {"task": "three"})
    summary = [{"length": 4096, "setting": setting} for setting, _, _ in rows]
    return Result(
        kind="accuracy", command="", settings={"settings": [row[0] for row in rows]}, seed=0,
        machine={}, libraries={}, commit="", date="", figures={"cells": cells, "summary": summary},
    )  # fmt: skip


def test_panels_compare_what_all_settings_answered() -> None:
    small, large = compared(ablation())
    assert (small.budget, large.budget, small.tokens) == (256, 512, 4096)
    assert small.tasks == ("one", "two")
    assert small.full == pytest.approx(99.0)
    (stride,) = small.family("stride")
    assert stride.share == pytest.approx(0.52)
    assert stride.score.value == pytest.approx(55.0)
    assert [point.share for point in large.family("tau")] == pytest.approx([0.3, 0.5])
    (quest,) = large.family("quest")
    assert quest.share == 1.0
    assert quest.by_task == pytest.approx({"one": 90.0, "two": 88.0})


def units(tokens: int) -> Any:
    return (("unit_tokens", tokens),)


def test_other_units_are_another_panel() -> None:
    """A line joins what differs in when it retrieves, and in nothing else."""
    result = ablation()
    more = []
    for cell in result.figures["cells"]:
        if "tau=0" in cell["setting"] or "quest" in cell["setting"]:
            size = "group" if "quest" in cell["setting"] else "cluster"
            more.append(cell | {"setting": f"{cell['setting']},{size}_tokens=4"})
        if "tau=0.6" in cell["setting"]:  # one setting of its kind: nothing to compare
            more.append(cell | {"setting": f"{cell['setting']},summary=mean+spread"})
    result.figures["cells"] += more
    panels = compared(result)
    assert [(panel.budget, panel.rest) for panel in panels] == [
        (256, units(16)), (256, units(4)), (512, units(16)), (512, units(4)),
    ]  # fmt: skip
    assert [len(panel.family("tau")) for panel in panels] == [2, 2, 2, 2]
    assert [len(panel.points) for panel in panels] == [7, 3, 7, 3]
    titles = [axes.get_title() for axes in draw(louiskv.retrievals(result)).axes]
    assert titles[1] == "256 of 4K tokens selected, unit_tokens=4"


def test_one_boundary_setting_is_no_ablation() -> None:
    result = ablation()
    result.figures["cells"] = [
        cell for cell in result.figures["cells"]
        if "louiskv" not in cell["setting"] or "tau=0.6" in cell["setting"]
    ]  # fmt: skip
    assert not has_retrievals(result)


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): [(round(x, 3), round(y, 1)) for x, y in line.get_xydata()]
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def heights(axes: Any, digits: int) -> list[float]:
    return [round(patch.get_height(), digits) for patch in axes.patches]


def test_scores_lie_over_their_share_of_retrievals() -> None:
    figure: Figure = draw(louiskv.retrievals(ablation()))
    small, large = figure.axes
    assert lines(small)["semantic boundaries, by \u03c4"] == [(0.3, 35.0), (0.5, 75.0)]
    assert lines(large)["fixed stride, in steps"] == [(0.52, 59.0)]
    assert [y for _, y in lines(large)["quest"]] == [89.0]
    assert {y for _, y in lines(large)["full attention"]} == {99.0}
    assert [text.get_text() for text in large.texts] == ["0.6", "0.8", "2"]
    assert "2 tasks of 4 samples" in figure.get_suptitle()


def test_bars_are_what_every_step_retrieves() -> None:
    figure = draw(louiskv.units(ablation()))
    assert heights(figure.axes[1], 1) == [96.0, 94.0, 50.0, 48.0, 90.0, 88.0, 88.0, 86.0]


def test_segments_by_length_layer_and_neighbour() -> None:
    lengths, layers, alike = draw(louiskv.segments(ablation())).axes
    # tau 0.6: 40 and 20 of 60 segments; tau 0.8: 60 and 40 of 100. Nothing is longer than four.
    assert [height for height in heights(lengths, 3) if height] == [0.667, 0.333, 0.6, 0.4]
    assert [t.get_text() for t in lengths.get_xticklabels()] == ["1", "2", "3\u20134"]
    assert lines(layers)["\u03c4 0.6"] == [(0, 0.4), (1, 0.2)]
    assert lines(alike)["\u03c4 0.8"] == [(0.5, 0.7)]


def test_report_draws_an_ablation_that_counts(tmp_path: Path) -> None:
    result = ablation()
    assert has_retrievals(result)
    result.save(tmp_path / "louis.json")
    names = figures_drawn(tmp_path / "louis.json")
    assert names == ["louis-retrievals", "louis-units", "louis-segments", "louis-budgets"]


def test_the_list_of_ablations_has_what_the_figures_want() -> None:
    settings = parse_settings(["louiskv-ablations"])
    texts = [setting.text for setting in settings]
    assert len(texts) == len(set(texts)) == 25
    result = ablation()
    result.figures["cells"] = [
        {"length": 4096, "task": "one", "setting": text, "scores": [0.5]} for text in texts
    ]
    for panel in compared(result):
        families = Counter(point.family for point in panel.points)
        assert families == {"tau": 5, "stride": 3, "every": 1, "pages": 1, "quest": 1, "arkvale": 1}


def test_nothing_to_compare() -> None:
    result = ablation()
    result.figures["cells"] = [cell | {"scores": [], "retrieval": None}
                               for cell in result.figures["cells"]]  # fmt: skip
    assert not has_retrievals(result)
    for chart in (louiskv.retrievals, louiskv.units):
        with pytest.raises(ConfigError, match="no two settings"):
            chart(result)
    with pytest.raises(ConfigError, match="semantic boundaries"):
        draw(louiskv.segments(result))


def test_cells_add_up_and_the_table_says_how_often() -> None:
    first = Cell(task="one", setting="louiskv", scores=[1.0], retrieval=counted(0.5))
    first.merge(Cell(task="one", setting="louiskv", scores=[1.0], retrieval=counted(0.3)))
    assert first.retrieval is not None
    assert first.retrieval["steps"] == [200, 200]
    assert "40%" in accuracy_table([first])
