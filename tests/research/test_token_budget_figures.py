"""Figure of methods over budgets of tokens: the right number at the right place, or no figure."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.figures import louiskv
from research.figures.chart import draw
from research.figures.louiskv import has_token_budgets
from research.figures.report import run

SCORES = {
    "full": 1.0,
    "louiskv:selected_tokens=256,window_tokens=64,tau=0.8": 0.5,
    "louiskv:selected_tokens=512,window_tokens=64,tau=0.8": 0.75,
    "louiskv:selected_tokens=512,window_tokens=64,tau=0.9": 0.8,
    "quest:selected_tokens=256,window_tokens=64": 0.25,
    "quest:selected_tokens=512,window_tokens=64": 0.4,
}


def make(scores: dict[str, float], lengths: tuple[int, ...] = (16384, 32768)) -> Result:
    """The second length is a tenth worse, and so is the second task."""
    cells: list[dict[str, Any]] = [
        {"length": length, "task": task, "setting": setting, "scores": [score - worse - far] * 3}
        for far, length in zip((0.0, 0.1), lengths, strict=False)
        for setting, score in scores.items() for task, worse in (("one", 0.0), ("two", 0.1))
    ]  # fmt: skip
    summary = [{"length": length, "setting": setting} for length in lengths for setting in scores]
    return Result(
        kind="accuracy", command="", settings={"settings": list(scores)}, seed=0, machine={},
        libraries={}, commit="", date="", figures={"cells": cells, "summary": summary},
    )  # fmt: skip


def lines(axes: Any) -> dict[str, list[float]]:
    return {
        line.get_label(): [round(float(y), 6) for y in line.get_ydata()]
        for line in axes.get_lines() if not line.get_label().startswith("_")
    }  # fmt: skip


def test_scores_lie_at_their_budgets() -> None:
    figure = draw(louiskv.token_budgets(make(SCORES)))
    near, far = figure.axes
    assert [axes.get_title("left") or axes.get_title() for axes in (near, far)] == [
        "16K tokens", "32K tokens",
    ]  # fmt: skip
    for axes, worse in ((near, 5), (far, 15)):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512"]
        found = lines(axes)
        assert found.pop("full attention") == pytest.approx([100 - worse] * 2)
        # What all settings have is not said; what they differ in is.
        assert found == {
            "louiskv: tau=0.8": pytest.approx([50 - worse, 75 - worse]),
            "louiskv: tau=0.9": pytest.approx([80 - worse]),
            "quest": pytest.approx([25 - worse, 40 - worse]),
        }
    assert "2 tasks of 3 samples" in figure.get_suptitle()


def test_settings_that_answered_less_are_left_out() -> None:
    result = make(SCORES, (16384,))
    for cell in result.figures["cells"]:
        if cell["setting"].startswith("quest") and cell["task"] == "two":
            cell["scores"] = []
    [axes] = draw(louiskv.token_budgets(result)).axes
    assert "quest" not in lines(axes)
    assert not has_token_budgets(result), "one method is left"


@pytest.mark.parametrize(
    ("without", "has"),
    [("nothing", True), ("quest:selected_tokens=256", False), ("louiskv", False)],
)
def test_two_methods_at_two_budgets_are_a_figure(without: str, has: bool) -> None:
    kept = {text: score for text, score in SCORES.items() if without not in text}
    assert has_token_budgets(make(kept)) == has


def test_many_lines_are_no_figure() -> None:
    more = {f"louiskv:selected_tokens=256,tau=0.{n}": 0.5 for n in range(1, 10)}
    assert not has_token_budgets(make(SCORES | more))


def test_no_budgets() -> None:
    with pytest.raises(ConfigError, match="selected_tokens"):
        draw(louiskv.token_budgets(make({"full": 1.0, "kvswap@1/13": 0.9})))


def test_report_draws_it_or_says_that_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(SCORES).save(tmp_path / "a.json")
    assert run([str(tmp_path / "a.json"), "--folder", str(tmp_path)]) == ["a-budgets"]
    assert imread(tmp_path / "a-budgets.png")[..., :3].std(axis=2).max() > 0.05, (
        "axes alone have no colour"
    )
    several = {"louiskv:tau=0.8": 0.5, "louiskv:tau=0.9": 0.6}
    make(several).save(tmp_path / "b.json")
    capsys.readouterr()
    assert run([str(tmp_path / "b.json"), "--folder", str(tmp_path)]) == []
    assert "no figure" in capsys.readouterr().out
