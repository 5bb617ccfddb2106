"""Figures come out of result files, and simulated devices are marked."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.figures.report import draw_all


def saved(path: Path, kind: str, settings: dict[str, Any], figures: dict[str, Any]) -> Path:
    result = Result.begin(kind, [], settings, seed=0)
    result.figures = figures
    result.save(path)
    return path


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    figures = {"median_ms": ms, "p10_ms": ms * 0.9, "p90_ms": ms * 1.2, "tokens_per_s": 1e3 / ms}
    base = {"name": name, "batch": 1, "simulated": False, "synthetic_stream": False}
    return {**base, "is_floor": False, "figures": figures, **more}


def test_throughput(tmp_path: Path) -> None:
    rows = [
        row("floor, StaticCache", 50, is_floor=True), row("kvswap", 60),
        row("kvswap (emmc, simulated)", 300, simulated=True),
        {**row("StaticCache", 1, batch=8), "figures": {}},
    ]  # fmt: skip
    settings = {"config": "tiny", "context": 2048, "memory": "1/13"}
    path = saved(tmp_path / "speed.json", "throughput", settings, {"rows": rows})
    assert draw_all([path], tmp_path / "figures") == ["speed"]
    drawn = (tmp_path / "figures" / "speed.svg").read_text()
    assert "kvswap (emmc, simulated)" in drawn
    assert "batch 8" not in drawn
    assert imread(tmp_path / "figures" / "speed.png")[..., :3].std(axis=2).max() > 0.05, (
        "axes alone have no colour"
    )


def test_accuracy(tmp_path: Path) -> None:
    cells = [
        {"task": "a", "setting": "full", "scores": [1.0]},
        {"task": "a", "setting": "kvswap@1/13", "scores": [0.0]},
    ]
    summary = [
        {"setting": "full", "loss": 0.0, "loss_error": 0.0},
        {"setting": "kvswap@1/13", "loss": 2.0, "loss_error": 0.5},
        {"setting": "kvswap@1/34", "loss": 5.0, "loss_error": None},
        {"setting": "kvswap@1/13:group_tokens=8", "loss": 3.0, "loss_error": 0.5},
    ]
    settings = {"tokens": 16384, "samples": 50}
    path = saved(tmp_path / "a.json", "accuracy", settings, {"cells": cells, "summary": summary})
    assert draw_all([path], tmp_path) == ["a-tasks", "accuracy-by-budget"]
    drawn = (tmp_path / "accuracy-by-budget.svg").read_text()
    assert "1/13" in drawn
    assert "1/34" in drawn
    assert "16,384 tokens" in drawn


def settings_drawn(tmp_path: Path, *names: str, **more: Any) -> list[str]:
    cells = [{"task": "a", "setting": name, "scores": [1.0]} for name in names]
    summary = [{"setting": name, "loss": 1.0, "loss_error": 0.5} for name in names]
    settings = {"tokens": 2048, "samples": 1, **more}
    figures = {"cells": cells, "summary": summary}
    return draw_all([saved(tmp_path / "a.json", "accuracy", settings, figures)], tmp_path)


def test_options_alone_make_no_ablation(tmp_path: Path) -> None:
    told = "louiskv@1/8:tau=0.85"
    assert "a-tasks" in settings_drawn(tmp_path, "full", "kvswap@1/8", told)
    drawn = (tmp_path / "a-tasks.svg").read_text()
    assert "louiskv@1/8" in drawn
    assert "tau" not in drawn
    assert settings_drawn(tmp_path, "full", "kvswap@1/8", "kvswap@1/8:group_tokens=8") == []


def test_models_are_not_mixed(tmp_path: Path) -> None:
    names = settings_drawn(tmp_path, "full", "kvswap@1/8", model="other")
    assert names == ["a-tasks", "accuracy-by-budget-other"]
    assert "on other" in (tmp_path / "a-tasks.svg").read_text()


def test_nothing_to_draw(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.json", "throughput", {"config": "x"}, {"rows": []})
    with pytest.raises(ConfigError, match="no row"):
        draw_all([path], tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a result"):
        draw_all([tmp_path / "other.json"], tmp_path)
