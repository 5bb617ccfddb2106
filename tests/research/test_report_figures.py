"""Figures of needle grids and fronts: the right number at the right place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.figures import accuracy
from research.figures.accuracy import Dot, by_length, dots_of, front_of
from research.figures.chart import draw
from research.figures.report import draw_all


def make(kind: str, settings: dict[str, Any], **figures: Any) -> Result:
    return Result(
        kind=kind, command="", settings=settings, seed=0, machine={"cores": 2, "gpu": None},
        libraries={}, commit="", date="", figures=figures,
    )  # fmt: skip


def titles(figure: Figure) -> list[str]:
    return [axes.get_title("left") or axes.get_title() for axes in figure.axes]


def panel(figure: Figure, title: str = "") -> Any:
    return figure.axes[titles(figure).index(title)]


def tick_labels(axes: Any, which: str) -> list[str]:
    return [label.get_text() for label in getattr(axes, f"get_{which}ticklabels")()]


# Needles ------------------------------------------------------------------------------------------


def needle_grid() -> Result:
    """Different scores everywhere: length and depth, settings and rows cannot be swapped unseen."""
    cells = [
        {"tokens": tokens, "depth": depth, "setting": setting, "refused": None,
         "scores": [(10 * row + 3 * column + shift) / 100]}
        for shift, setting in ((0, "full"), (50, "kvswap@1/13"))
        for column, tokens in ((1, 16384), (0, 2048))
        for row, depth in ((2, 1.0), (0, 0.0), (1, 0.5))
    ]  # fmt: skip
    gone = next(cell for cell in cells if (cell["tokens"], cell["depth"]) == (2048, 0.5))
    gone.update(scores=[], refused="too little memory")
    return make("needles", {"task": "single_essay"}, cells=cells)


def test_needles_lie_at_their_length_and_depth() -> None:
    figure = draw(accuracy.needles(needle_grid()))
    for shift, title in ((0, "full"), (50, "kvswap at 1/13")):
        axes = panel(figure, title)
        assert tick_labels(axes, "x") == ["2K", "16K"]
        assert axes.get_ylim()[0] > axes.get_ylim()[1], "the document's start is at the top"
        wanted = {(c, r): f"{10 * r + 3 * c + shift}" for c in range(2) for r in range(3)}
        if shift == 0:
            del wanted[0, 1]
        written = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
        assert written == wanted
        image = np.ma.getdata(axes.images[0].get_array())
        assert image[2, 0] == pytest.approx(20 + shift)
        assert image[0, 1] == pytest.approx(3 + shift)
        assert axes.images[0].get_clim() == (0, 100), "one scale for all panels"
    assert tick_labels(panel(figure, "full"), "y") == ["0", "50", "100"]
    refused = [patch for patch in panel(figure, "full").patches if patch.get_hatch()]
    assert [patch.get_center().tolist() for patch in refused] == [[0.0, 1.0]]
    assert not panel(figure, "kvswap at 1/13").patches
    assert "hatched" in figure.get_suptitle()


def test_many_needle_cells_have_no_numbers() -> None:
    cells = [
        {"tokens": 1024 * n, "depth": d / 9, "setting": "full", "scores": [1.0], "refused": None}
        for n in range(1, 13)
        for d in range(10)
    ]
    axes = panel(draw(accuracy.needles(make("needles", {"task": "t"}, cells=cells))), "full")
    assert len(axes.texts) == 0


# Pareto front -------------------------------------------------------------------------------------


def dot(method: str, share: float, score: float, budget: str = "1/13") -> Dot:
    return Dot(method=method, budget=budget, share=share, score=score)


def test_the_front_has_those_that_no_other_beats() -> None:
    dots = [
        dot("best", 1 / 13, 99), dot("twin", 1 / 13, 99), dot("same memory", 1 / 13, 98),
        dot("same score", 1 / 12, 99), dot("small", 1 / 40, 60), dot("worse", 1 / 20, 59),
        dot("middle", 1 / 20, 80), dot("least", 1 / 90, 0),
    ]  # fmt: skip
    assert [d.method for d in front_of(dots)] == ["least", "small", "middle", "best", "twin"]


def summary(setting: str, mean: float | None, ledger: int, full: int, **more: Any) -> Any:
    loss = None if mean is None else 100 * (1 - mean)
    return {
        "setting": setting, "mean": mean, "loss": loss, "loss_low": loss, "loss_high": loss,
        "loss_error": 0.1, "ledger_bytes": ledger, "full_cache_bytes": full, **more,
    }  # fmt: skip


def compared(**more: Any) -> list[Any]:
    return [
        summary("full", 1.0, 1300, 1300, **more),
        summary("kvswap@1/13", 0.97, 100, 1300, **more),
        summary("quest@1/13", 0.97, 100, 5200, **more),
        summary("loki@1/13", 0.5, 90, 5200, **more),
        summary("kvswap@1/34", 0.9, 40, 1300, **more),
        summary("loki@1/34", None, 0, 0, **more),
        summary("h2o@1/34", 0.1, 39, 1300, **more),
    ]


def answered(summaries: list[Any], tokens: Any = 16384, **more: Any) -> Result:
    cells = [
        {"task": "single", "setting": each["setting"], "scores": [1.0, 0.0], "tokens": 77,
         **({"length": each["length"]} if "length" in each else {})}
        for each in summaries
    ]  # fmt: skip
    return make("accuracy", {"tokens": tokens, "samples": 2}, summary=summaries, cells=cells)


def test_memory_is_a_share_of_what_full_attention_takes() -> None:
    dots = {(d.method, d.budget): d for d in dots_of(answered(compared()))}
    assert len(dots) == 5
    assert dots["quest", "1/13"].share == pytest.approx(1 / 13)
    full, small = summary("full", 1.0, 1300, 1300), summary("h2o@1/13", 0.5, 60, 1200)
    [own] = dots_of(answered([full, small]))
    assert own.share == pytest.approx(1 / 20), "a smaller batch's own full cache counts"
    assert dots["kvswap", "1/34"].share == pytest.approx(40 / 1300)
    assert dots["kvswap", "1/34"].score == pytest.approx(90)


def test_who_did_not_answer_all_tasks_is_hollow_and_no_front() -> None:
    tasks = {"kvswap@1/34": 1, "loki@1/34": 0}
    both = answered([{**s, "tasks": tasks.get(s["setting"], 2)} for s in compared()])
    dots = {(d.method, d.budget): d for d in dots_of(both)}
    assert [key for key, d in dots.items() if d.in_part] == [("kvswap", "1/34")]
    assert [d.method for d in front_of(list(dots.values()))] == ["h2o", "loki", "kvswap", "quest"]
    axes = panel(draw(accuracy.pareto(both)))
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    assert [line.get_xydata()[0].tolist() for line in hollow] == [[40 / 1300, 90.0]]
    assert "hollow: not all tasks" in panel(draw(accuracy.pareto(both))).figure.get_suptitle()
    methods = draw(accuracy.methods(both))
    assert "hollow: not all tasks" in methods.get_suptitle()
    white = [line for line in panel(methods).get_lines() if line.get_color() == "white"]
    spots = [spot for line in white for spot in np.asarray(line.get_xydata()).tolist()]
    kvswap = tick_labels(panel(methods), "y").index("kvswap")
    [[loss, place]] = spots
    assert loss == pytest.approx(10)
    assert kvswap < place < kvswap + 0.5, "the second budget's dot"
    finished = answered([{**s, "tasks": 2 if s["mean"] else 0} for s in compared()])
    assert "hollow" not in draw(accuracy.pareto(finished)).get_suptitle()


def test_a_method_that_was_not_run_does_not_pass_for_one_that_does_not_fit() -> None:
    assert "or not run" in draw(accuracy.methods(answered(compared()))).get_suptitle()
    refused = [{**s, "refused": None if s["mean"] else "too little"} for s in compared()]
    assert "or not run" not in draw(accuracy.methods(answered(refused))).get_suptitle()


def test_the_front_is_drawn_through_its_dots() -> None:
    figure = draw(accuracy.pareto(answered(compared())))
    axes = panel(figure)
    assert len(figure.axes) == 1
    [front] = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-post"]
    shares, scores = np.transpose(front.get_xydata())
    assert shares[:-1] == pytest.approx([39 / 1300, 40 / 1300, 1 / 13, 1 / 13])
    assert scores == pytest.approx([10, 90, 97, 97, 97])
    assert shares[-1] >= axes.get_xlim()[1] * 0.999, "more memory is no worse"
    assert axes.get_xscale() == "log"
    marks = [
        line.get_xydata()[0].tolist() for line in axes.get_lines() if line.get_marker() in "Do"
    ]
    assert [1 / 13, 97.0] in [[pytest.approx(x), pytest.approx(y)] for x, y in marks]
    assert len(marks) == 5
    assert axes.get_xlim()[0] < min(x for x, _ in marks) < max(x for x, _ in marks) < shares[-1]
    assert "16,384" in figure.get_suptitle()


def test_labels_do_not_lie_on_each_other() -> None:
    crowd = [
        summary(f"method-{n}@1/13", 0.9 + 0.002 * (n % 4), 100 + n // 4, 1300) for n in range(16)
    ]
    figure = draw(accuracy.pareto(answered([summary("full", 1.0, 1300, 1300), *crowd])))
    axes = panel(figure)
    assert len(figure.axes) == 1
    boxes = [t.get_window_extent() for t in axes.texts if t.get_text().startswith("method")]
    assert sum(t.get_text().count("method") for t in axes.texts) == 16
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_a_panel_for_each_length(tmp_path: Path) -> None:
    short = [{**each, "mean": each["mean"] and each["mean"] / 2} for each in compared(length=8192)]
    both = answered([*compared(length=16384), *short], [16384, 8192])
    assert [one.settings["tokens"] for one in by_length(both)] == [8192, 16384]
    assert len(by_length(both)[0].figures["cells"]) == 7
    figure = draw(accuracy.pareto(both))
    assert titles(figure) == ["8K tokens", "16K tokens"]
    for title, top in (("8K tokens", 48.5), ("16K tokens", 97)):
        axes = panel(figure, title)
        [front] = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-post"]
        assert np.max(front.get_xydata()[:, 1]) == pytest.approx(top)
    assert titles(draw(accuracy.methods(both))) == ["8K tokens", "16K tokens"]
    both.save(tmp_path / "two.json")
    names = draw_all([tmp_path / "two.json"], tmp_path)
    assert names == ["two-tasks", "two-pareto", "accuracy-by-budget"]
    drawn = (tmp_path / "accuracy-by-budget.svg").read_text()
    assert "8,192 tokens" in drawn
    assert "16,384 tokens" in drawn


# All of them --------------------------------------------------------------------------------------


def test_results_and_their_figures(tmp_path: Path) -> None:
    needle_grid().save(tmp_path / "n.json")
    assert draw_all([tmp_path / "n.json"], tmp_path) == ["n"]
    assert imread(tmp_path / "n.png")[..., :3].std(axis=2).max() > 0.05, "axes alone have no colour"
    assert (tmp_path / "n.svg").exists()


def test_nothing_to_draw_is_refused() -> None:
    cell = {"tokens": 1024, "depth": 0.5, "setting": "full", "scores": [], "refused": None}
    with pytest.raises(ConfigError, match="no cell"):
        draw(accuracy.needles(make("needles", {"task": "t"}, cells=[cell])))
    with pytest.raises(ConfigError, match="no cell"):
        draw(accuracy.needles(make("needles", {"task": "t"}, cells=[])))
    with pytest.raises(ConfigError, match="no method"):
        draw(
            accuracy.pareto(
                answered([summary("full", 1.0, 13, 13), summary("loki@1/13", None, 0, 0)])
            )
        )
