"""The scripts of examples/ run in an empty folder, and what they print is right.

They run in this process, one after the other. Answers that a script calls right are looked up in
its prompt here.
"""

import ast
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.shared_weights import read_once

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LINES_MAX = 85
POLICY_MODULES = {"penstock.core.shape", "penstock.engine.scored_policy"}
"""What a policy of one's own is written with, beside the public names."""

Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    with read_once():
        yield


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in the test's own empty folder: what it printed, and its names."""
    monkeypatch.chdir(tmp_path)

    def run_script(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out, names

    return run_script


def path_of(prompt: str) -> str:
    """The only right answer to a puzzle, as its rules say."""
    body, _, start = prompt.rpartition(" Answer : ")
    leads_to = dict(re.findall(r"(\w+ \w+) > (\w+(?: \w+)?) ;", body))
    hops, place = "", start
    while place != "stop":
        place = leads_to[place]
        hops += f"> {place} "
    return f"{hops}."


def test_a_folder_of_files_answers_and_is_read_once(run: Run) -> None:
    printed, names = run("folder_of_files.py")
    for file, secret in names["SECRETS"].items():
        assert f"{file}: {secret}   [prefilled 581 tokens; " in printed
    changed = Path("notes/monday.txt")
    changed.write_text(changed.read_text().replace("sharp wheel", "open island"))
    Path("notes/tuesday.txt").unlink()
    printed, _ = run("folder_of_files.py", "notes")
    assert "monday.txt: open island   [prefilled" in printed
    assert "friday.txt: quick potato   [opened" in printed


def test_a_chat_goes_on_where_it_was(run: Run) -> None:
    opening = 20 * "The grass is green . The sky is blue . The sun is yellow . Here we go . "
    told, _ = run("chat_that_survives.py", "--opening", opening)
    assert "\nquick potato\n" in told
    asked, _ = run("chat_that_survives.py")
    assert "\nsharp wheel\n" in asked
    assert "sharp wheel" not in asked.split("\nsharp wheel\n")[0]  # the question does not say it
    [held] = re.findall(r"The chat holds ([\d,]+)\.$", told, re.MULTILINE)
    assert asked.startswith(f"The chat holds {held} tokens.")
    assert int(re.findall(r"Prefilled (\d+) tokens", asked)[0]) < 30


def test_a_policy_of_ones_own_answers(run: Run) -> None:
    printed, names = run("custom_policy.py")
    right = path_of(names["make_puzzle"](names["random"].Random(0))[0])
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert set(lines) == {"full", "mean_key"}
    assert {name: line.partition("  ")[2] for name, line in lines.items()} == dict.fromkeys(
        lines, f"right: {right}"
    )
    held = {name: float(line.split()[0]) for name, line in lines.items()}
    assert held["mean_key"] < held["full"] / 3


@pytest.mark.slow
def test_a_search_finds_what_one_sample_does_not(run: Run) -> None:
    printed, names = run("search_with_verifier.py")
    prompt, _ = names["make_puzzle"](names["random"].Random(1))
    sample, found = re.findall(r"^(one sample|search): (\w+)\n  (.*)$", printed, re.MULTILINE)
    assert sample[:2] == ("one sample", "wrong")
    assert sample[2] != path_of(prompt)
    assert found == ("search", "right", path_of(prompt))


def test_the_verifier_counts_hops(run: Run) -> None:
    names = runpy.run_path(str(EXAMPLES / "search_with_verifier.py"))
    prompt = "Memorize . Follow the path later . a b > c d ; c d > e f ; Question : x Answer : a b"
    texts = ["> c d > e f", "> c d > e", "> c d >", "> c d > c d", "> e f"]
    *good, later, sooner = names["verify"](prompt, texts)
    assert good == [2.0, 2.0, 2.0]
    assert sooner < later < 0


@pytest.mark.slow
def test_quality_is_measured_at_every_budget(run: Run) -> None:
    printed, names = run("budget_against_quality.py", "--puzzles", "1", "--budgets", "1/4,1/6")
    share = names["share_of_hops"]
    assert share("> a b > c d > x", ["a b", "c d", "e f", "stop"]) == 0.5
    assert share("> a b > stop .", ["a b", "stop"]) == 1.0
    row = r"^(\w+) +1/(\d) +([\d.]+) of ([\d.]+) MiB +(\d+)%$"
    rows = re.findall(row, printed, re.MULTILINE)
    assert [row[:2] for row in rows] == [("kvswap", "4"), ("kvswap", "6"), ("quest", "4")]
    for policy, share_of_memory, held, full, right in rows:
        assert (
            float(held) <= 1.02 * float(full) / int(share_of_memory) + 0.05
        )  # tables; printed digits
        if policy == "kvswap":
            assert right == "100"
    assert re.search(
        r"^quest +1/6 +refused: memory=[\d.]+ MiB is too little", printed, re.MULTILINE
    )


def test_scripts_are_short_say_how_to_run_and_use_public_names() -> None:
    assert len(SCRIPTS) == 5
    for path in SCRIPTS:
        text = path.read_text()
        assert len(text.splitlines()) <= LINES_MAX, path.name
        tree = ast.parse(text)
        assert f"\n    python {path.name}" in (ast.get_docstring(tree) or ""), path.name
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "penstock":
                assert {each.name for each in node.names} <= set(penstock.__all__), path.name
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("penstock"):
                assert node.module in POLICY_MODULES, f"{path.name}: {node.module}"
