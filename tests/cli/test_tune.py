"""`penstock tune`: what a person sees, the file, and bad input in one line."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import tune as command
from penstock.cli.main import app
from penstock.cli.tune import TuneProgress
from penstock.testing.tiny_chat import tiny_chat_model
from penstock.tuner import engine_run, fetch_survey, kvswap_search, other_policies, pace

RUN = CliRunner()
QUICK = ["tune", "talks", "--max-context", "1024", "--memory", "1/2", "--disk", "memory"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_run, "STEPS", 2)
    monkeypatch.setattr(engine_run, "WARM_STEPS", 1)
    monkeypatch.setattr(fetch_survey, "STEPS", 2)
    monkeypatch.setattr(fetch_survey, "WARM_STEPS", 1)
    for module in (fetch_survey, kvswap_search):
        monkeypatch.setattr(module, "ROUNDS", 2)
    for name, count in (("POINTS", 3), ("CHECKS", 2), ("FINALISTS", 2), ("FINAL_ROUNDS", 3)):
        monkeypatch.setattr(kvswap_search, name, count)
    monkeypatch.setattr(pace, "_PASSES", 1)
    monkeypatch.setattr(other_policies, "varied", partial(other_policies.varied, most=2))
    monkeypatch.setattr("penstock.tuner.tune.FORCED_TOKENS", 8)


@pytest.fixture(autouse=True)
def _here(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


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


def test_a_config_a_table_and_a_reason(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "config.json"
    tables = tmp_path / "tables.json"
    done = RUN.invoke(
        app,
        [
            *QUICK,
            "--policies",
            "kvswap,streaming_llm",
            "--text",
            str(text),
            "-o",
            str(out),
            "--save-tables",
            str(tables),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "kvswap G=" in done.output
    assert "KL" in done.output
    assert "…" not in done.output
    assert json.loads(out.read_text())["format"] == "penstock-config-1"
    assert json.loads(tables.read_text())["entries"]
    assert not list(tmp_path.glob("*.partial"))


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
def test_bad_input(arguments: list[str], words: str, tmp_path: Path, text: Path) -> None:
    base = QUICK if "--text" in arguments else [*QUICK, "--text", str(text)]
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
