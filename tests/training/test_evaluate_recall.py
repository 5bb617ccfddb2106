"""Evaluation of recall models: the same cells whoever makes the samples, and what tables say."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.evaluate.result import Result
from penstock.evaluate.tasks import Words
from penstock.models.loader import LoadedModel, load
from training import evaluate
from training.asked import Asked, Asker, Job, recall_asker
from training.checkpoint import read_vocabulary
from training.data import GENERATORS
from training.evaluation import Cell, CellRun, mark_batch
from training.examine import draw_sample, mark

VOCABULARY = read_vocabulary()
WORDS = Words.of(VOCABULARY)


@pytest.fixture(scope="module")
def recall() -> LoadedModel:
    return load("recall", dtype="float32")


def cells_of(recall: LoadedModel, tasks: list[str], lengths: list[int], **more: Any) -> list[Cell]:
    cells = [Cell(task=task, tokens=tokens) for tokens in lengths for task in tasks]
    workers, generate = more.pop("workers", 0), more.pop("generate", 0)
    run = CellRun(recall, cells, samples=more.pop("samples", 3), generate_most=1200)
    run.run(recall_asker, (VOCABULARY, 0, generate), workers=workers, keep=lambda: None, **more)
    return run.cells


def test_the_bundled_model_is_found_right(recall: LoadedModel) -> None:
    cells = cells_of(recall, ["multi_key_full", "variable_tracking"], [250], generate=1)
    for cell in cells:
        assert cell.exact == cell.asked == 3
        assert cell.right_tokens == cell.leading_tokens == cell.answer_tokens
        assert cell.generated_exact == cell.generated == 1


def test_processes_change_nothing(recall: LoadedModel) -> None:
    tasks, lengths = ["copy", "count_words", "long_walk"], [60, 200]
    here = cells_of(recall, tasks, lengths, samples=2)
    there = cells_of(recall, tasks, lengths, samples=2, workers=2)
    assert here == there
    refused = {(cell.task, cell.tokens) for cell in here if cell.refused}
    assert ("long_walk", 60) in refused
    assert all(cell.asked == (0 if cell.refused else 2) for cell in here)


def test_batches_mark_as_single_rows_do(recall: LoadedModel) -> None:
    """Padding behind a row's end is seen by nothing that is looked at."""
    ask = recall_asker(VOCABULARY, 0, 0)
    jobs = [Job(0, task, tokens, 0) for task in ("copy", "count_words") for tokens in (90, 250)]
    together = mark_batch(recall.model, [ask(job) for job in jobs])

    def guess(ids: torch.Tensor, count: int) -> torch.Tensor:
        logits = recall.model(input_ids=ids, use_cache=False).logits
        guessed: torch.Tensor = logits[0, -count - 1 : -1].argmax(-1)
        return guessed

    for job, seen in zip(jobs, together, strict=True):
        sample = draw_sample(job.task, 0, tokens=job.tokens, seed=0, words=WORDS)
        alone = mark(guess, sample, VOCABULARY, "cpu")
        assert (seen.right_tokens, seen.tokens) == (alone.right_tokens, alone.tokens)
        assert alone.exact == (seen.leading_tokens == seen.tokens)
        assert seen.leading_tokens <= seen.right_tokens


def test_what_comes_before_the_first_mistake(recall: LoadedModel) -> None:
    right = recall_asker(VOCABULARY, 0, 0)(Job(0, "copy", 400, 0))
    assert right.answer_tokens > 20
    ids = right.ids.copy()
    ids[-10] = VOCABULARY["blue"] if ids[-10] != VOCABULARY["blue"] else VOCABULARY["sky"]
    wrong = Asked(right.job, ids, right.answer_tokens, None)
    (seen,) = mark_batch(recall.model, [wrong])
    assert seen.leading_tokens == right.answer_tokens - 10
    assert seen.right_tokens < right.answer_tokens


def test_samples_are_those_of_the_bench() -> None:
    ask = recall_asker(VOCABULARY, 5, 1)
    kept, other = (ask(Job(0, "multi_value", 300, number)) for number in (0, 1))
    assert kept.sample == draw_sample("multi_value", 0, tokens=300, seed=5, words=WORDS)
    assert other.sample is None


def test_time_that_is_up_ends_it(recall: LoadedModel) -> None:
    assert not any(cell.asked for cell in cells_of(recall, ["copy"], [100], end=0.0))
    ended = cells_of(recall, ["copy"], [100], end=0.0, workers=1)
    assert not any(cell.asked for cell in ended)


def test_answers_too_long_to_decode_are_not(recall: LoadedModel) -> None:
    run = CellRun(recall, [Cell(task="copy", tokens=400)], samples=2, generate_most=5)
    run.run(recall_asker, (VOCABULARY, 0, 2), workers=0, keep=lambda: None)
    assert run.cells[0].asked == 2
    assert run.cells[0].generated == 0


def test_long_answers_are_told() -> None:
    cell = Cell(task="long_walk", tokens=4096, asked=2, exact=1, answer_tokens=4000,
                right_tokens=3990, leading_tokens=3000).figures()  # fmt: skip
    short = Cell(task="copy", tokens=4096, asked=2, exact=2, answer_tokens=20, right_tokens=20,
                 leading_tokens=20).figures()  # fmt: skip
    text = evaluate.report([cell, short])
    assert "2,000 (0.75)" in text
    assert text.count("copy") == 1
    assert "0.50" in text
    assert evaluate.answers_table([short]) == ""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "e.json"
    words = ["recall", "--tokens", "300", "--tasks", "copy,long_walk", "--samples", "2",
             "--dtype", "float32", "--out", str(out)]  # fmt: skip
    assert evaluate.main([*words, "--workers", "1"]) == 0
    assert "mean answer in tokens" in capsys.readouterr().out
    cells = Result.load(out).figures["cells"]
    assert [(cell["task"], cell["asked"]) for cell in cells] == [("copy", 2), ("long_walk", 2)]
    assert evaluate.main(["recall", "--tasks", "nothing", "--workers", "0"]) == 2
    assert "no task is called" in capsys.readouterr().err


def test_every_task_is_asked_as_it_is_drawn() -> None:
    ask: Asker = recall_asker(VOCABULARY, 0, 0)
    for task in GENERATORS:
        asked = ask(Job(0, task, 700, 3))
        sample = GENERATORS[task](700, random.Random(f"0/{task}/700/3"), WORDS)
        wanted = [VOCABULARY[word] for word in f"{sample.prompt} {sample.answer}".split()]
        assert asked.ids.tolist() == [1, *wanted, 2]
        assert asked.answer_tokens == sample.max_new_tokens
