"""`penstock tune`: what a person sees, the file, and bad input in one line."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import tune as command
from penstock.cli.main import app
from penstock.cli.tune import TuneProgress
from penstock.testing.tiny_chat import tiny_chat_model
from penstock.tuner import (
    build_tables,
    engine_run,
    fetch_survey,
    kvswap_search,
    other_policies,
    pace,
)

RUN = CliRunner()
QUICK = ["tune", "talks", "--max-context", "1024", "--memory", "1/2", "--disk", "memory"]


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_run, "STEPS", 2)
        patch.setattr(engine_run, "WARM_STEPS", 1)
        patch.setattr(fetch_survey, "STEPS", 2)
        patch.setattr(fetch_survey, "WARM_STEPS", 1)
        for module in (fetch_survey, kvswap_search):
            patch.setattr(module, "ROUNDS", 2)
        for name, count in (("POINTS", 3), ("CHECKS", 2), ("FINALISTS", 2), ("FINAL_ROUNDS", 3)):
            patch.setattr(kvswap_search, name, count)
        patch.setattr(pace, "_PASSES", 1)
        patch.setattr(other_policies, "varied", partial(other_policies.varied, most=2))
        patch.setattr("penstock.tuner.tune.FORCED_TOKENS", 8)
        patch.setattr(build_tables, "GROUPS", (4, 8))
        patch.setattr(build_tables, "RANKS", (48, 32))
        yield


@pytest.fixture(scope="module", autouse=True)
def _here(models: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of two layers, "talks"."""
    folder = tmp_path_factory.mktemp("models")
    tiny_chat_model(folder=folder / "talks")
    return folder


@pytest.fixture(scope="module")
def text(models: Path) -> Path:
    """Of 1,400 characters and more, a token each."""
    path = models / "text.txt"
    path.write_text("".join(f"On day {n} the ship had {n * 7 % 90} sacks . " for n in range(45)))
    return path


@pytest.fixture(scope="module")
def tuned(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What a run said, and the folder of its config and its tables."""
    folder = tmp_path_factory.mktemp("tuned")
    files = ("--text", text, "-o", folder / "config.json", "--save-tables", folder / "tables.json")
    words = [*QUICK, "--policies", "kvswap,streaming_llm", *map(str, files)]
    return RUN.invoke(app, words, env={"COLUMNS": "80"}), folder


def test_a_config_a_table_and_a_reason(tuned: tuple[Any, Path]) -> None:
    done, folder = tuned
    assert done.exit_code == 0, done.output
    assert "kvswap G=" in done.output
    assert "KL" in done.output
    assert "…" not in done.output
    assert json.loads((folder / "config.json").read_text())["format"] == "penstock-config-1"
    assert json.loads((folder / "tables.json").read_text())["entries"]
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "kvswop"], "no policy 'kvswop'"),
        (["--policies", " , "], "names no policy"),
        (["--memory", "3 cups"], "3 cups"),
        (["--memory", "8KiB"], "smallest budget that would do"),
        (["--max-context", "10"], "at least 1024"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--tables", "nowhere.json"], "nowhere.json"),
        (["--adapter", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_bad_input(
    arguments: list[str], words: str, tmp_path: Path, text: Path, tuned: tuple[Any, Path]
) -> None:
    base = [*QUICK, "--tables", str(tuned[1] / "tables.json")]
    base += [] if "--text" in arguments else ["--text", str(text)]
    done = RUN.invoke(app, [*base, *arguments, "-o", str(tmp_path / "c.json")])
    assert done.exit_code != 0
    assert words in " ".join(str(done.exception or done.output).split()) + done.output
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("place", ["", "missing/c.json"])
def test_an_output_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    done = RUN.invoke(app, [*QUICK, "-o", str(tmp_path / place)])
    assert done.exit_code != 0
    assert "--output" in done.output


def test_an_interrupted_run_says_where_its_measurements_are(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.tuner import tune as module

    def interrupted(*args: object, **settings: object) -> None:
        Path(str(settings["journal"])).write_text("{}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "tune", interrupted)
    done = RUN.invoke(app, [*QUICK, "--text", str(text), "-o", str(tmp_path / "c.json")])
    assert "c.json.partial: the same command goes on" in " ".join(done.output.split())


def test_progress_in_a_pipe_is_twenty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with TuneProgress(Console(force_terminal=False)) as progress:
        for i in range(1000):
            progress.update(i / 999, "running")
    assert 20 <= len(capsys.readouterr().out.splitlines()) <= 21


def test_names() -> None:
    assert command._names("kvswap, quest,") == ["kvswap", "quest"]


def test_the_pick_names_what_was_chosen_even_where_it_is_the_default() -> None:
    from penstock.methods.tuned_config import Figures, Solution

    figures: Figures = {
        "tokens_per_s": 1.0, "first_token_s": 1.0, "resident_bytes": 1, "read_bytes_per_token": 1.0,
        "kl": None,
    }  # fmt: skip
    solution = Solution(
        batch=1, context=1024, policy="kvswap", fields={"selected_tokens": 200, "reuse_tokens": 0},
        limit_bytes=1, predicted=figures, measured=None, reason="", is_pick=True,
    )  # fmt: skip
    assert command._words(solution) == "kvswap G=4 MG=200 C=0"
