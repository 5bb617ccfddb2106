"""`python -m research.clusters` as a program: its result, tables and figures."""

import json
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.result import Result
from penstock.models.loader import load
from research.clusters import run as program
from research.clusters.run import PAPER_VARIANCE, paper_ratio, spaced
from research.figures import clusters
from research.figures.chart import draw
from tests.research.drawn_figures import figures_drawn

SMALL = [
    "--prompt=160",
    "--max-new-tokens=72",
    "--buffers=0,4",
    "--buffer-layers=1",
    "--layout-layers=1",
]


@pytest.fixture(scope="module")
def ran(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The result's file, and what a run said on stdout and stderr."""
    out = tmp_path_factory.mktemp("clusters") / "clusters-small.json"
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as progress:
        program.run([*SMALL, f"--model={shallow}", f"--out={out}", "--json"])
    return out, said.getvalue(), progress.getvalue()


@pytest.fixture(scope="module")
def result_file(ran: tuple[Path, str, str]) -> Path:
    return ran[0]


def test_a_run(result_file: Path) -> None:
    document = json.loads(result_file.read_text())
    assert document["kind"] == "clusters"
    assert document["command"].startswith("python -m research.clusters --prompt=160")
    found = document["figures"]
    assert (found["model"], found["output"], found["output_tokens"]) == ("shallow", "ring_walk", 72)
    assert 150 <= found["prompt_tokens"] <= 160
    assert found["layers"] == [0, 1]
    assert found["entry_bytes"] == 2 * 64 * 2
    assert [row["update"] for row in found["methods"]] == ["static", "local", "adaptive", "global"]
    assert [row["buffer"] for row in found["buffers"]["rows"]] == [0, 4]
    assert found["buffers"]["layers"] == [1]
    assert found["layouts"]["layers"] == [1]
    assert len(found["pictures"]) == 2
    assert found["drift"]["part_ends"][-1] == 72


def test_tables_have_the_papers_values(ran: tuple[Path, str, str]) -> None:
    out, said, progress = ran
    result = Result.load(out)
    assert "% " in progress
    *lines, last = said.splitlines()
    assert json.loads(last) == result.as_dict()
    text = "\n".join(lines)
    for value in ("1.69", "7.9", "25.3", "40.8", "10,000x", "30%..59%"):
        assert value in text
    variance = result.figures["methods"][0]["by_key"]
    assert f"{variance:.1f}" in text
    del result.figures["buffers"]
    with pytest.raises(ConfigError, match="all --parts"):
        draw(clusters.costs(result))
    assert paper_ratio("global") is None
    pairs = zip(PAPER_VARIANCE["static"], PAPER_VARIANCE["adaptive"], strict=True)
    assert paper_ratio("static") == pytest.approx(sum(a / b for a, b in pairs) / 8)


def test_a_text_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the sky is blue . the grass is green . " * 60)
    result = program.run(
        ["--text", str(path), "--prompt=100", "--max-new-tokens=40", "--parts=drift", "--chunk=64"]
    )
    assert result.figures["output"] == "text"
    assert result.figures["prompt_tokens"] == 100
    assert str(path) not in json.dumps(result.as_dict())
    with pytest.raises(PromptError, match="cannot read text"):
        program.run([f"--text={tmp_path}/none.txt"])


def test_generated_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: where two tokens are near in bfloat16, reading on may prefer the other."""
    monkeypatch.setattr(program, "load", partial(load, dtype="float32"))
    result = program.run(["--generate", "--prompt=100", "--max-new-tokens=20", "--parts=drift"])
    assert (result.figures["output"], result.figures["expected"]) == ("generated", 1.0)


def test_figures(result_file: Path, tmp_path: Path) -> None:
    names = figures_drawn(result_file)
    assert names == [f"clusters-small{part}" for part in ("", "-drift", "-keys")]
    result = Result.load(result_file)
    drift = draw(clusters.drift(result))
    drawn: Any = drift.axes[0].get_lines()[1].get_ydata()
    assert list(drawn) == result.figures["drift"]["outside"][1]
    bars: Any = draw(clusters.costs(result)).axes[0].patches
    rows = result.figures["methods"]
    assert bars[0].get_height() == pytest.approx(rows[0]["by_key"] / rows[2]["by_key"])
    assert len(draw(clusters.keys(result)).axes) == 6
    empty = Result.begin("clusters", [], {}, seed=0)
    for chart in (clusters.costs, clusters.drift, clusters.keys):
        with pytest.raises(ConfigError):
            chart(empty)


def test_bad_input() -> None:
    for arguments, said in (
        (["--top=0"], "--top"), (["--prompt=20"], "two clusters"), (["--parts=all"], "'all'"),
        (["--buffers=a"], "numbers like"), (["--buffers=-1,2"], "negative"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            program.run(arguments)


def test_layers_are_spaced() -> None:
    assert spaced(8, 4) == [1, 3, 5, 7]
    assert spaced(8, 2) == [3, 7]
    assert spaced(2, 5) == [0, 1]
    assert spaced(5, 2)[-1] == 4
