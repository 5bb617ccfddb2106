"""Grid: jobs in their order, what is tried again, and what ends a run."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, sit
from research.grid import Grid, attempt

CPU = torch.device("cpu")


class Letters(Grid[tuple[str, int]]):
    """Two rows a job: a letter small and large."""

    SHARED, GROWING, KEY = ("model",), ("letters",), ("letter", "number", "large")

    def __init__(self, settings: dict[str, Any], failing: str = "") -> None:
        super().__init__(settings, [(letter, 1) for letter in settings["letters"]])
        self.asked: list[str] = []
        self.opened = self.closed = 0
        self._failing = failing

    @override
    def keys(self, job: tuple[str, int]) -> list[tuple[Any, ...]]:
        return [(*job, False), (*job, True)]

    @override
    def title(self, job: tuple[str, int]) -> str:
        return f"letter {job[0]}"

    @override
    def measure(self, job: tuple[str, int], progress: Progress) -> list[dict[str, Any]]:
        self.asked.append(job[0])
        rows: list[dict[str, Any]] = [
            {"letter": job[0], "number": job[1], "large": large} for large in (False, True)
        ]
        if job[0] == self._failing:
            rows[1]["error"] = "RuntimeError: no ink"
        return rows

    @override
    def open(self) -> None:
        self.opened += 1

    @override
    def close(self) -> None:
        self.closed += 1

    @override
    def report(self) -> str:
        return " ".join(sorted({row["letter"] for row in self.rows}))


def run(out: Path, grid: Letters, **more: Any) -> Result:
    args = argparse.Namespace(out=str(out), resume=out.exists(), json=False, **more)
    result = Result.begin("letters", [], grid.settings, seed=0, package="research")
    return sit(Sitting(result, args), grid, args)


def test_a_job_with_a_failed_row_is_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    run(out, Letters({"model": "m", "letters": ["a", "b"]}, failing="a"))
    again = Letters({"model": "m", "letters": ["b", "a", "c"]})
    result = run(out, again)
    assert again.asked == ["a", "c"]
    assert (again.opened, again.closed) == (1, 1)
    assert result.settings["letters"] == ["a", "b", "c"]
    rows = result.figures["rows"]
    assert [row["letter"] for row in rows] == ["b", "b", "a", "a", "c", "c"]
    assert not any("error" in row for row in rows)
    assert Result.load(out).figures == result.figures
    done = Letters({"model": "m", "letters": ["c"]})
    run(out, done)
    assert (done.asked, done.opened) == ([], 0), "nothing is left, so nothing is loaded"
    assert capsys.readouterr().out.splitlines() == ["a b", "a b c", "a b c"]
    with pytest.raises(ConfigError, match="model=m, not n"):
        run(out, Letters({"model": "n", "letters": ["c"]}))


def test_nothing_begins_when_the_time_is_up(tmp_path: Path) -> None:
    grid = Letters({"model": "m", "letters": ["a"]})
    assert run(tmp_path / "result.json", grid, minutes=0).figures["rows"] == []
    assert (grid.asked, grid.closed) == ([], 1)


def test_a_lost_gpu_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = Letters({"model": "m", "letters": ["a", "b"]})
    lost = {"letter": "a", "number": 1, "large": True, "error": "gone", "device_lost": True}
    monkeypatch.setattr(grid, "measure", lambda job, progress: [lost])
    with pytest.raises(ConfigError, match="the GPU is lost after letter a: gone; --resume"):
        run(tmp_path / "result.json", grid)
    assert Result.load(tmp_path / "result.json").figures["rows"] == [lost]
    assert capsys.readouterr().out == "a\n", "what there is has been printed"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (BudgetError("too small"), {"skipped": "too small"}),
        (torch.OutOfMemoryError("full\nmore"), {"skipped": "out of memory: full"}),
        (ValueError("wrong\nmore"), {"error": "ValueError: wrong"}),
        (RuntimeError(), {"error": "RuntimeError: "}),
    ],
)
def test_a_row_that_fails_says_why(error: Exception, found: dict[str, str]) -> None:
    def fail() -> dict[str, Any]:
        raise error

    row = attempt({"method": "x"}, fail, CPU)
    assert row.pop("row_s") >= 0
    assert row == {"method": "x", **found}
    assert attempt({"method": "x"}, lambda: {"ms": 1}, CPU).keys() == {"method", "ms", "row_s"}
