"""Defaults of options out of the environment and a file; `penstock config` says which."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.settings import (
    GENERAL,
    OWN_MEANING,
    PER_CALL,
    commands,
    parameters,
    settings_path,
    variable,
)

FILE = """
memory = "2GiB"
log-level = "info"
max_new_tokens = 64

[generate]
temperature = 0.5   # a comment
"exact" = true
stop = ["one", "two words"]

[doc.add]
chunk = 512
"""


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def settings(*words: str) -> dict[tuple[str, str], tuple[str, str]]:
    result = run("config", *words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["settings"]
    return {(each["command"], each["name"]): (each["value"], each["source"]) for each in found}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(FILE, encoding="utf-8")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        monkeypatch.setenv(name, "error")  # a log level sets them, and they are put back
    return path


def test_command_line_environment_file_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del file
    monkeypatch.setenv("PENSTOCK_MEMORY", "3GiB")
    monkeypatch.setenv("PENSTOCK_DOC_ADD_MEMORY", "4GiB")
    monkeypatch.setenv("PENSTOCK_DEVICE", "")  # as if it were not set
    found = settings()
    assert found["generate", "memory"] == ("3GiB", "PENSTOCK_MEMORY")
    assert found["doc add", "memory"] == ("4GiB", "PENSTOCK_DOC_ADD_MEMORY")
    assert found["generate", "max-new-tokens"] == ("64", "penstock.toml, line 4")
    assert found["generate", "temperature"] == ("0.5", "penstock.toml, line 7")
    assert found["generate", "exact"] == ("true", "penstock.toml, line 8")
    assert found["generate", "stop"] == ("'one', 'two words'", "penstock.toml, line 9")
    assert found["doc add", "chunk"] == ("512", "penstock.toml, line 12")
    assert found["generate", "chunk"] == ("1024", "default")
    assert found["generate", "device"] == ("cpu", "default")
    # These commands have a meaning of their own for it.
    assert found["demo", "memory"] == ("1/34", "default")
    assert found["doc ask", "memory"] == ("stored", "default")


def test_a_run_takes_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[plan]\nhardware = "orin-agx"\ncontext = 4096\nbatch = 2\n')
    monkeypatch.setenv("PENSTOCK_PLAN_BATCH", "3")
    monkeypatch.setenv("PENSTOCK_PLAN_MODEL", "qwen3-0.6b")
    made = json.loads(run("plan", "--json").stdout)
    assert (made["batch"], made["context"]) == (3, 4096)
    made = json.loads(run("plan", "--json", "--batch", "4").stdout)
    assert (made["batch"], made["context"], made["model"]) == (4, 4096, "qwen3-0.6b")


def test_the_table_names_sources_and_can_leave_out_the_rest(file: Path) -> None:
    shown = run("config", "--changed").stdout
    assert shown.startswith(f"file: {file}\n")
    assert "penstock.toml, line 7" in " ".join(shown.split())
    assert "default" not in shown
    assert {command for command, _ in settings("doc")} == {
        "doc add", "doc ask", "doc ls", "doc show", "doc verify", "doc rm", "doc gc",
    }  # fmt: skip
    assert "there is no command dok" in run("config", "dok").stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('\nmemry = "2GiB"', "line 2: memry: there is no such setting for all commands; did you"),
        ("[generat]", "line 1: generat: there is no such command; did you mean generate?"),
        ("[generate]\n\nmemori = 1", "setting of penstock generate; did you mean memory?"),
        ("[generate]\n\nmemori = 1", "line 3: generate.memori: there is no such setting"),
        ("[doc]\nchunk = 1", "line 2: doc.chunk: there is no such setting of penstock doc"),
        ("[generate]\nforce = true", "line 2: generate.force: there is no such setting"),
        ("[generate]\nmax-new-tokens = 12.5", "line 2: generate.max-new-tokens: "),
        ('[generate]\nmax-new-tokens = "12"', "'12' must be a number, without quotes"),
        ('generate.exact = "yes"', "line 1: generate.exact: 'yes' must be true or false"),
        ("memory = true", "line 1: memory: true must be a text or a number"),
        ("memory = [1]", "line 1: memory: [1] must be a text or a number"),
        ('log-level = "loud"', "line 1: log-level: "),
        ("a = \n", "is no TOML: Invalid value (at line 1, column 5)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    for words in (["config"], ["doc", "ls"], ["generate", "--prompt", "x"]):
        result = run(*words)
        assert result.exit_code == 2, result.output
        [line] = result.stderr.splitlines()
        assert line.startswith(f"error: {file}")
        assert said in line
    assert run("generate", "--help").exit_code == 0
    assert run("config", "--path").stdout == f"{file}\n"


def test_the_file_is_where_the_platform_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "none.toml"))
    assert "there is no file" in run("doc", "ls").stderr
    monkeypatch.delenv("PENSTOCK_CONFIG")
    monkeypatch.setattr(typer, "get_app_dir", lambda name: str(tmp_path / name))
    assert settings_path() == tmp_path / "penstock.toml"
    assert run("config", "--path").exit_code == 0
    assert "(there is none)" in run("config", "generate").stdout


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_NEW_TOKENS", "many")
    said = " ".join(run("generate", "--prompt", "x").stderr.split())
    assert "--max-new-tokens" in said
    assert "(out of PENSTOCK_MAX_NEW_TOKENS)" in said


def test_the_names_are_those_of_options() -> None:
    root: Any = get_command(app)
    every = {path: parameters(path, command) for path, command in commands(root)}
    known = {name for found in every.values() for name in found}
    assert known >= GENERAL
    assert {name for names in OWN_MEANING.values() for name in names} <= known
    assert not known & PER_CALL
    for path, names in OWN_MEANING.items():
        assert names <= every[path].keys()
    variables = [variable(path, name) for path, found in every.items() for name in found]
    assert len(set(variables)) == len(variables)
    taken = {*map(variable, GENERAL), *variables}
    assert not taken & {"PENSTOCK_KERNELS", "PENSTOCK_CONFIG", "PENSTOCK_LOG_LEVEL"}


def test_a_log_level_shows_what_is_logged(file: Path) -> None:
    words = ["generate", "--prompt", "The sky is", "--max-new-tokens", "1", "--disk", "memory"]
    file.write_text('log-level = "info"')
    said = run(*words).stderr
    assert "INFO penstock.models.cache_adapter: TieredCache(kvswap, memory " in said
    assert "INFO" not in run(*words, "--log-level", "error").stderr, "the command line comes first"


def test_options_of_penstock_itself_may_stand_behind_a_command(file: Path) -> None:
    file.write_text("x = 1")
    for words in (["--debug", "doc", "ls"], ["doc", "ls", "--debug"]):
        assert type(run(*words).exception).__name__ == "ConfigError"
    assert "--log-level" in run("doc", "ls", "--log-level", "loud").stderr
    assert "--log-level" in run("doc", "ls", "--log-level").stderr
