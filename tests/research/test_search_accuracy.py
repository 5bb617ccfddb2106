"""Accuracy of search: the verifier, the summary by hand, and the program at toy size."""

import json
import random
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import STYLE
from penstock.evaluate.intervals import wilson
from penstock.evaluate.result import Result
from penstock.evaluate.tasks import GeneratedTasks, Sample
from penstock.evaluate.tasks.sample import score
from penstock.models.loader import LoadedModel, load
from research.figures import search
from research.figures.chart import draw
from research.figures.report import charts_of
from research.search_accuracy import program
from research.search_accuracy.program import accuracy_tables, summarise
from research.search_accuracy.searches import Plan, answer_document, small_memory
from research.search_accuracy.verifier import follow, rate_hops, read_rules
from tests.research.drawn_figures import figures_drawn

PROMPT = (
    "Memorize the path rules below . Follow the path later . "
    "red fox > blue cow ; grey hen > red fox ; blue cow > stop ; tan owl > grey hen ; "
    "Question : Start at grey hen and follow the path until stop . Answer : grey hen"
)
WHOLE = "> red fox > blue cow > stop ."
TOY = ["--tokens=64", "--temperatures=2.0", "--beams=1,4", "--checked-beams=4", "--step=6"]


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load("recall", dtype="float32")


def drawn(loaded: LoadedModel, count: int, tokens: int) -> list[Sample]:
    assert loaded.tokenizer is not None
    source = GeneratedTasks(loaded.tokenizer)
    return source.draw("pointer_chasing", 0, count, tokens=tokens, seed=3)


def test_the_verifier_counts_hops_up_to_the_first_mistake() -> None:
    assert read_rules(PROMPT) == (
        {"red fox": "blue cow", "grey hen": "red fox", "blue cow": "stop", "tan owl": "grey hen"},
        "grey hen",
    )
    texts = [
        "", ">", "> red", "> red fox", "> red fox > blue", WHOLE,
        "> red cow", "> red fox > red", "> red fox > blue cow > stop ;", f"{WHOLE} >", "red fox",
        "> blue cow > stop .",
    ]  # fmt: skip
    assert rate_hops(PROMPT, texts) == [
        0, 0, 0, 1, 1, 3,
        -1, -1 / 2, -1 / 3, -1 / 4, -1, -1,
    ]  # fmt: skip


def test_of_whole_texts_only_the_answer_gets_all_hops(bundled: LoadedModel) -> None:
    """The verifier reads the prompt alone; the task's own answer judges it."""
    rng = random.Random(0)
    for sample in drawn(bundled, 3, 384):
        rules, start = read_rules(sample.prompt)
        words = sample.answer.split()
        hops = words.count(">")
        assert follow(rules, start, sample.answer) == (hops, False)
        for at in rng.sample(range(len(words)), 12):
            wrong = rng.choice([word for word in words if word != words[at]])
            other = " ".join([*words[:at], wrong, *words[at + 1 :]])
            assert follow(rules, start, other) == (at // 3, True), "a hop has three words"
            assert rate_hops(sample.prompt, [other, sample.answer])[0] < 0


@pytest.mark.parametrize("prompt", ["Once upon a time .", PROMPT + " and", PROMPT[:60]])
def test_other_prompts_are_refused(prompt: str) -> None:
    with pytest.raises(ConfigError, match="pointer_chasing"):
        rate_hops(prompt, ["> red fox"])


def test_best_of_n_is_what_n_samples_give(bundled: LoadedModel) -> None:
    """Drawn from one run of the largest N; a run of a smaller N has the same samples."""
    [sample] = drawn(bundled, 1, 64)
    records = []
    for beams in ((1, 2), (4,)):
        plan = Plan(beams=beams, width=2, step_tokens=6, small_beams=0,
                    small=small_memory("1/2", "auto"))  # fmt: skip
        seen: list[int] = []

        def report(what: str, count: int, seen: list[int] = seen) -> None:
            seen.append(count)

        records.append(answer_document(
            bundled, sample, plan, temperature=2.5, seed=11, checked=False, report=report,
        ))  # fmt: skip
        assert seen == [beams[-1], *2 * [count for count in beams if count > 1]]
    few, many = (record["methods"] for record in records)
    assert many["single"]["hops"][:2] == few["single"]["hops"]
    assert len(set(many["single"]["hops"])) > 1, "samples that are all alike show nothing"
    for at, count in enumerate((1, 2)):
        assert few["best_of_verified"]["right"][at] == max(many["single"]["right"][:count])
    for method in ("verified", "logprob", "best_of_verified", "best_of_logprob"):
        assert few[method]["hops"][0] == few["single"]["hops"][0], "one beam is one sample"


def record(temperature: float, document: int, **right: list[int]) -> dict[str, Any]:
    methods = {
        name: {"right": values, "hops": [10 * value for value in values]}
        for name, values in right.items()
    }
    return {"temperature": temperature, "document": document, "methods": methods}


def made_up() -> list[dict[str, Any]]:
    """Two beams or four; the search is right in the second document only with four."""
    rest = {"logprob": [0, 0], "best_of_logprob": [0, 0]}
    return [
        record(0.0, 0, greedy=[1]), record(0.0, 1, greedy=[0]),
        record(1.5, 0, single=[0, 1, 0, 0], verified=[1, 1], best_of_verified=[1, 1], **rest),
        record(1.5, 1, single=[0, 0, 0, 0], verified=[0, 1], best_of_verified=[0, 0], **rest),
    ]  # fmt: skip


def test_rows_by_hand() -> None:
    found = summarise(made_up(), [2, 4])
    rows = {(row["method"], row["beams"]): row for row in found["rows"]}
    assert len(rows) == 8
    assert [rows["verified", n]["accuracy"] for n in (2, 4)] == [0.5, 1.0]
    assert [rows["verified", n]["hops"] for n in (2, 4)] == [5.0, 10.0]
    assert [rows["best_of_verified", n]["right"] for n in (2, 4)] == [1, 1]
    limits = wilson(1, 2)
    assert (rows["verified", 2]["low"], rows["verified", 2]["high"]) == (limits.low, limits.high)
    greedy, single = found["references"]
    assert (greedy["method"], greedy["accuracy"], greedy["documents"]) == ("greedy", 0.5, 2)
    assert (single["accuracy"], single["samples"], single["hops"]) == (1 / 8, 8, 1.25)
    differences = {
        (row["second"], row["beams"]): row["value"] for row in found["differences"]
    }  # fmt: skip
    assert differences["best_of_verified", 2] == 0
    assert differences["best_of_verified", 4] == 0.5
    assert differences["logprob", 4] == 1.0
    assert found["small_memory"] is None


def test_the_figure_shows_the_rows(tmp_path: Path) -> None:
    figures = {"hops": 32, **summarise(made_up(), [2, 4])}
    result = Result(
        kind="search_accuracy", command="", seed=0, machine={}, libraries={}, commit="", date="",
        settings={"model": "recall", "tokens": 512, "step": 12, "width": 2}, figures=figures,
    )  # fmt: skip
    table = " ".join(accuracy_tables(figures).split())
    assert "step-wise search, verifier 50 (9-91) 100 (34-100) best of N" in table
    with matplotlib.rc_context(STYLE):
        figure = draw(search.accuracy(result))
    [axes] = figure.axes
    assert "12 % of single samples" in axes.get_title(loc="left")
    heights = {
        container.get_label(): np.asarray(container.lines[0].get_ydata()).tolist()
        for container in axes.containers
        if isinstance(container, ErrorbarContainer)
    }
    assert heights["step-wise search, verifier"] == [0.5, 1.0]
    assert heights["best of N, verifier"] == [0.5, 0.5]
    result.save(tmp_path / "search-toy.json")
    assert figures_drawn(tmp_path / "search-toy.json") == ["search-toy"]
    result.figures = {"rows": []}
    with pytest.raises(ConfigError, match="no rows"):
        charts_of(result, "x")


def test_the_program_goes_on_and_changes_nothing_in_small_memory(
    bundled: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def loaded(name: str, *, dtype: str) -> LoadedModel:
        assert (name, dtype) == ("recall", "float32")
        return bundled

    monkeypatch.setattr(program, "load", loaded)
    out = tmp_path / "accuracy.json"
    (tmp_path / "tier").mkdir()
    common = [*TOY, "--memory=1700KiB", f"--store={tmp_path / 'tier'}", f"--out={out}", "--resume"]
    first = program.run([*common, "--documents=1", "--checked=1"])
    before = first.figures["documents"]
    result = program.run([*common, "--documents=2", "--checked=1", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == json.loads(out.read_text())
    assert result.figures["documents"][:2] == before
    assert printed.err.count("document 1: greedy") == 1
    keys = [(one["temperature"], one["document"]) for one in result.figures["documents"]]
    assert keys == [(0.0, 0), (2.0, 0), (0.0, 1), (2.0, 1)]
    rows = {(row["method"], row["beams"]): row for row in result.figures["rows"]}
    assert rows["verified", 1]["hops"] < rows["verified", 4]["hops"] <= 4
    assert rows["verified", 4]["right"] > rows["verified", 1]["right"]
    greedy = result.figures["references"][0]
    assert (greedy["method"], greedy["right"], greedy["hops"]) == ("greedy", 2, 4)
    small = result.figures["small_memory"]
    assert (small["searches"], small["same_answer"], small["same_tree"]) == (1, 1, 1)
    assert small["most_groups"] > 1
    assert small["loaded_bytes"] > 0
    assert small["limit_bytes"] < small["full_bytes"]
    assert result.settings["weights"]
    other = Result.load(out)
    other.settings["weights"] = "of another model in a folder of the same name"
    other.save(tmp_path / "other.json")
    elsewhere = [word for word in common if word != f"--out={out}"]
    with pytest.raises(ConfigError, match="made with weights=of another"):
        program.run([*elsewhere, f"--out={tmp_path}/other.json", "--documents=2", "--checked=1"])
    with pytest.raises(ConfigError, match="made with step=6"):
        program.run([*common[:4], "--step=3", *common[5:], "--documents=2"])
    with pytest.raises(ConfigError, match="has 2 documents"):
        program.run([*common, "--documents=1"])


def test_answers_are_judged_by_the_task(bundled: LoadedModel) -> None:
    """What the verifier rates highest is exactly what the task calls right."""
    [sample] = drawn(bundled, 1, 128)
    [whole, short] = rate_hops(sample.prompt, [sample.answer, sample.answer.removesuffix(" .")])
    assert score(sample, sample.answer) == 1
    assert whole == 8 > short


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beams=4,2"], "ascending"),
        (["--beams=many"], "numbers such as"),
        (["--temperatures=0,1"], "greedy is always run"),
        (["--beams=1,2", "--checked-beams=1"], "--checked-beams 1 is none of the searches"),
        (["--beams=1,3", "--checked=0"], "multiple of 2"),
        (["--documents=0"], "at least 1"),
        (["--resume"], "name it"),
    ],
)
def test_options_that_make_no_sense(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        program.run(options)
