"""One name for one thing over all commands, and former names that still work."""

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli.bench import PROGRAMS
from penstock.cli.command import RENAMED
from penstock.cli.main import app
from penstock.cli.options import DISK_NAMES, POLICY_NAMES
from penstock.cli.search import _plan_command
from penstock.cli.settings import commands
from penstock.core.renamed_options import under_new_names
from penstock.devices.presets import PRESETS
from penstock.evaluate import accuracy, needles, record_selections, throughput
from penstock.evaluate.audit import program as audit
from penstock.evaluate.documents import program as documents
from penstock.methods import POLICIES

FORMER = {
    "store", "path", "out", "prefill-chunk", "chunk-size", "new-tokens", "max-tokens", "on",
    "cache-dir",
}  # fmt: skip
"""Other words for --disk, --output, --chunk, --max-new-tokens and --device."""
METAVARS = {
    "memory": ("SIZE",), "disk": ("PATH|", "nvme|"), "max-new-tokens": ("TOKENS",),
    "chunk": ("TOKENS",), "output": ("FILE",), "prompt-file": ("FILE",), "adapter": ("FILE",),
    "stop": ("TEXT",), "library": ("DIR",),
}  # fmt: skip
"""How the value of an option begins in every command's help."""


def typer_options() -> Iterator[tuple[str, Any]]:
    root: Any = get_command(app)
    yield from (("", each) for each in root.params)
    for path, command in [*commands(root), ("search plan", _plan_command())]:
        yield from ((path, each) for each in command.params)


def options_of_programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What the programs with parsers of their own know, as their parsers are made."""
    made: list[tuple[str, list[str]]] = []
    add = argparse.ArgumentParser.add_argument

    def note(self: argparse.ArgumentParser, *names: str, **settings: Any) -> Any:
        if settings.get("help") != argparse.SUPPRESS:
            made.append((self.prog, list(names)))
        return add(self, *names, **settings)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", note)
    read = (accuracy, documents, needles, record_selections, throughput)
    assert len(read) == len(PROGRAMS)
    for program in (*read, audit):
        with pytest.raises(SystemExit):
            program.parse_arguments(["--help"])
    return made


def test_every_command_calls_a_thing_by_its_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        (path, opt)
        for path, each in typer_options()
        for opt in (*each.opts, *each.secondary_opts)
        if each.param_type_name == "option"
    ]
    seen += [(path, opt) for path, opts in options_of_programs(monkeypatch) for opt in opts]
    assert {"--disk", "--max-new-tokens", "--chunk", "--output", "-o"} <= {opt for _, opt in seen}
    former = {(path, opt) for path, opt in seen if opt.lstrip("-") in FORMER}
    assert former == {("config", "--path")}, "where a file is, which is no disk"
    assert {opt for _, opt in seen if "_" in opt} == set()
    outputs = [path for path, opt in seen if opt == "--output"]
    assert sorted(outputs) == sorted(path for path, opt in seen if opt == "-o")


def test_values_of_one_name_are_written_alike() -> None:
    for path, each in typer_options():
        name = max(each.opts, key=len).lstrip("-")
        if name in METAVARS:
            assert str(each.metavar).startswith(METAVARS[name]), (path, name, each.metavar)


def test_memory_says_what_it_bounds_in_every_help() -> None:
    found = [(path, each.help) for path, each in typer_options() if "--memory" in each.opts]
    assert len(found) >= 6
    assert [path for path, said in found if "KV cache" not in said] == []
    assert [path for path, said in found if "not the weights" not in said] == []


def test_former_names_belong_to_commands_and_lead_to_options() -> None:
    known: dict[str, set[str]] = {}
    for path, each in typer_options():
        known.setdefault(path, set()).update(each.opts)
    for path, names in RENAMED.items():
        assert set(names.values()) <= known[path]
        assert not set(names) & known[path]


def test_a_former_name_works_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["x", "--store", "a", "--store=b", "--", "--store"]
    assert list(under_new_names(words, {"--store": "--disk"})) == [
        "x", "--disk", "a", "--disk=b", "--", "--store",
    ]  # fmt: skip
    assert capsys.readouterr().err == "note: --store is called --disk now\n" * 2


def test_former_names_on_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["devices", "--path", "/no/such/folder"])
    assert result.stderr.splitlines()[0] == "note: --path is called --disk now"
    assert "there is no directory /no/such/folder" in result.stderr
    args = needles.parse_arguments(["--store", "memory", "--out=x.json"])
    assert (args.store, args.out) == ("memory", "x.json")
    assert capsys.readouterr().err.count("note: ") == 2


def test_what_a_shell_completes_to_is_what_there_is() -> None:
    assert set(POLICY_NAMES) == set(POLICIES)
    assert set(DISK_NAMES) == {*PRESETS, "auto", "memory", "host"}
