"""`penstock search`: the best answer on stdout, the search on stderr, one line for what fails."""

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.search_screen import SearchScreen, search_rows, tail
from penstock.core.ledger import MemoryReport
from penstock.engine.beams.decoding import GroupDone, StepTraffic
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import (
    SearchNode,
    SearchOutput,
    SearchPlace,
    SearchStep,
    SearchTree,
    StepRecord,
)
from tests.ready_process import ReadyProcess

PROMPT = "The grass is green . The sky is blue . The sun is yellow . Here we go ."
SMALL = (
    "recall", "--beams", 4, "--step", 4, "--max-new-tokens", 8, "--seed", 1, "--ignore-end",
    "--temperature", 2, "--disk", "memory",
)  # fmt: skip
SCORERS = """
import math, os, signal
calls = []
def by_length(texts):
    return [len(text) for text in texts]
def with_prompt(prompt, texts):
    assert prompt.startswith("The grass is green")
    return [len(text) for text in texts]
def fail(texts):
    raise ValueError("cannot\\nread this")
def nan(texts):
    return [math.nan] * len(texts)
def short(texts):
    return [1.0]
def refuse(texts):
    return [-math.inf] * len(texts)
def interrupt(texts):
    calls.append(texts)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return [len(text) for text in texts]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with scorers in it."""
    (tmp_path / "these_scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "these_scorers", raising=False)
    return tmp_path


def run(*arguments: object, prompt: str | None = PROMPT) -> Any:
    given = [] if prompt is None else ["--prompt", prompt]
    words = ["search", *map(str, arguments), *given]
    return CliRunner().invoke(app, words, env={"COLUMNS": "100"})


def test_the_answer_alone_is_on_stdout(tmp_path: Path) -> None:
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text(PROMPT)
    options = (*SMALL, "--dtype", "float32", "--memory", "1/2", "--tree", tmp_path / "tree.png")
    result = run(*options, "--prompt-file", prompt_file, prompt=None)
    assert result.exit_code == 0, result.output
    document = json.loads(run(*SMALL, "--dtype", "float32", "--json").stdout)
    assert result.stdout == f"{document['beams'][0]['text']}\n"
    for figure in ("prefill 100 %", "step 1/2  4/8 tokens  4 candidates in", "step 2/2  8/8 tok",
                   "ends in", "4, width 2, seed 1", "2 answers: 2 by length", "8 candidates, 4 pr",
                   "scheduled, at most", "fast memory", "ahead of its", "stall share"):  # fmt: skip
        assert figure in result.stderr, figure
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_document() -> None:
    result = run(*SMALL, "--memory", "1/2", "--json", "--delimiter", r" .\n")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["model"] == "recall"
    assert document["prompt"] == PROMPT
    assert document["settings"]["delimiter"] == " .\n"
    assert document["settings"]["seed"] == 1
    assert document["scorer"] == "logprob"
    assert len(document["beams"]) == 2
    assert [node["id"] for node in document["tree"]] == list(range(8))
    assert document["new_tokens"] == sum(len(node["token_ids"]) for node in document["tree"])
    memory = document["place"]["memory"]
    assert 0 < memory["peak_bytes"] <= memory["limit_bytes"]
    assert document["traffic"]["loaded_bytes"] > 0
    assert not document["interrupted"]


def test_strategies_and_switches_change_no_token() -> None:
    beams = [
        json.loads(run(*SMALL, "--dtype", "float32", "--json", *options).stdout)["beams"]
        for options in (
            ("--memory", "64MiB", "--strategy", "resident"),
            ("--memory", "1/2", "--strategy", "layerwise"),
            ("--memory", "1/2", "--no-share", "--no-prefetch", "--block-tokens", 8),
            ("--memory", "1/2", "--no-overlap", "--no-balance"),
        )
    ]
    tokens = [[beam["token_ids"] for beam in each] for each in beams]
    assert all(each == tokens[0] for each in tokens)


def test_a_scorer_from_the_current_folder(here: Path) -> None:
    for name in ("by_length", "with_prompt"):
        result = run(*SMALL, "--scorer", f"these_scorers:{name}", "--json")
        document = json.loads(result.stdout)
        assert document["scorer"] == f"these_scorers:{name}"
        for beam in document["beams"]:
            assert beam["score"] == len(beam["text"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--beams", 0), "beams=0 must be at least 1"),
        (("--beams", 3), "beams=3 cannot be shared out"),
        (("--temperature", 0), "temperature=0 makes all continuations of a beam equal"),
        (("--step", 50_000), "step_tokens=50,000 is longer than the context"),
        (("--max-new-tokens", 50_000), "50,000 more are asked for"),
        (("--memory", "10KiB"), "10 KiB of fast memory; give memory="),
        (("--scorer", "these_scorers:fail"), "raised ValueError: cannot read this"),
        (("--scorer", "these_scorers:nan"), "these_scorers:nan returned nan for text 0"),
        (("--scorer", "these_scorers:short"), "returned 1 scores for 4 texts"),
        (("--scorer", "these_scorers:refuse"), "refused all 4 candidates of step 1"),
        (("--scorer", "these_scorers:none"), "module these_scorers has no none"),
        (("--scorer", "nowhere:at_all"), "module nowhere was not found"),
        (("--scorer", "reward:nowhere"), "there is no config.json in nowhere"),
        (("--scorer", "reward:nowhere", "--device", "xla"), "has no such device"),
        (("--scorer", "these_scorers:nan", "--length-penalty", 2), "belongs to --scorer logprob"),
        (("--tree", "tree.txt"), "its name has to end in .png, .svg, .pdf"),
        (("--tree", "no/tree.png"), "does not exist"),
        (("--prompt-file", "prompt.txt"), "either --prompt or --prompt-file"),
    ],
    ids=str,
)
def test_what_fails_is_said_in_one_line(here: Path, options: tuple[object, ...], said: str) -> None:
    result = run(*SMALL, *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    besides = ("prefill 100 %", "try: ")  # what to try stands behind the error
    lines = [line for line in result.stderr.splitlines() if not line.startswith(besides)]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def test_ctrl_c_prints_the_best_so_far(here: Path) -> None:
    """It comes within the second step's ratings."""
    store = here / "store"
    store.mkdir()
    more = [str(store), "--scorer", "these_scorers:interrupt", "--dtype", "float32"]
    arguments = [*map(str, SMALL[:-1]), *more]
    arguments += ["--memory", "1/2", "--prompt", PROMPT]
    with ReadyProcess("from penstock.cli.entry import main; main()", "search", *arguments) as run:
        printed = run.stdout.read()
        assert run.wait() == 130, run.errors()
        first, *rest = run.errors().splitlines()
    assert first.startswith("prefill")
    assert [line.split("  ")[0] for line in rest] == ["step 1/2", rest[-1]]
    assert rest[-1] == "interrupted; nothing is left of what was not finished"
    assert len(printed.split()) == 4  # tokens of the first step
    assert list(store.iterdir()) == []


def test_the_plan_is_a_command_of_the_search() -> None:
    own = CliRunner().invoke(app, ["search", "--help"])
    assert "--beams" in own.stdout
    assert "Commands:" in own.stdout
    assert "plan  " in own.stdout
    plan = CliRunner().invoke(app, ["search", "plan", "--help"])
    assert plan.exit_code == 0
    assert "search plan [OPTIONS]" in plan.stdout
    assert "--scorer" not in plan.stdout


def node(index: int, fate: Any, score: float, text: str) -> SearchNode:
    return SearchNode(
        id=index, parent=None, step=0, token_ids=[1] * 4, text=text, text_start=0, num_tokens=4,
        score=score, log_probability=score, fate=fate,
    )  # fmt: skip


def test_the_live_view() -> None:
    nodes = [node(0, "kept", -0.5, "a b\nc " * 30), node(1, "finished", -0.25, "done [x]"),
             node(2, "pruned", -9, "gone")]  # fmt: skip
    traffic = StepTraffic(loaded_bytes=1 << 20, written_bytes=1 << 10)
    record = StepRecord(
        step=0, num_candidates=3, num_kept=1, num_finished=1, new_tokens=12, group_sizes=[2, 1],
        traffic=traffic, decode_s=2.0, score_s=0.0,
    )  # fmt: skip
    memory = MemoryReport(
        limit_bytes=4096, used_bytes=3072, peak_bytes=4096, full_cache_bytes=9000, items={}
    )
    place = SearchPlace(
        strategy="scheduled", memory=memory, store="a disk", simulated="nvme", notices=()
    )
    console = Console(file=StringIO(), force_terminal=True, width=80, color_system=None)
    params = SearchParams(beams=4, step_tokens=4, max_new_tokens=8, seed=1)
    with SearchScreen(console, params, lambda: place) as screen:
        screen.on_prefill(5, 5)
        screen.on_step(
            SearchStep(
                record=record, most_steps=2, nodes=nodes, tree=SearchTree(nodes), num_live=1,
                num_finished=1,
            )
        )  # fmt: skip
        screen.on_group(GroupDone(index=1, num_groups=3, num_beams=2, traffic=traffic))
        with console.capture() as capture:
            console.print(screen.view())
    shown = capture.get()
    for text in ("step 2/2", "4/8 tokens", "group 2 of 3", "done [x]", "finished", "-0.25",
                 "loaded 2 MiB", "written 2 KiB", "6.0 tokens/s", "3 KiB of 4 KiB"):  # fmt: skip
        assert text in shown, text
    assert "gone" not in shown
    assert shown.index("-0.25") < shown.index("-0.5")
    assert all(len(line) <= 80 for line in shown.splitlines())
    output = SearchOutput(
        prompt="", prompt_token_ids=[1], beams=[], tree=SearchTree(nodes), steps=[record],
        settings={"beams": 4, "width": 2, "seed": 1, "step_tokens": 4}, scorer="mine",
        prefill_s=1.0, wall_s=3.0, interrupted=True, place=place,
    )  # fmt: skip
    rows = dict(search_rows(output))
    assert rows["decode"] == "12 tokens, 6.0 tokens/s (simulated disk), 2.0 s"
    assert rows["found"] == "nothing yet"
    assert rows["strategy"] == "scheduled, at most 2 groups in a step"


@pytest.mark.parametrize(("text", "shown"), [("a  b\nc", "a b c"), ("x" * 30, "…" + "x" * 19)])
def test_tail(text: str, shown: str) -> None:
    assert tail(text, 20) == shown
