"""Names of earlier versions: modules of penstock.bench run, moved commands say where they are."""

import runpy
import sys

import pytest
from typer.testing import CliRunner

from penstock.cli.bench import RESEARCH
from penstock.cli.main import app


@pytest.mark.parametrize("name", ["throughput", "accuracy", "needles", "audit", "documents"])
def test_a_program_runs_under_its_former_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"penstock.bench.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_moved_option_says_where_it_is() -> None:
    done = CliRunner().invoke(app, ["audit", "--statistics", "--prompt-file", __file__])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith("python -m research.statistics")


@pytest.mark.parametrize("name", RESEARCH)
def test_a_moved_command_says_where_it_is(name: str) -> None:
    done = CliRunner().invoke(app, ["bench", name, "sweep", "--out", "x"])
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: penstock bench {name} ")
    assert line.endswith(f"python -m research.{RESEARCH[name]}")
