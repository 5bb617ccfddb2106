"""The accuracy program at toy size: settings, shared prefill, time limit, result."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate import accuracy, accuracy_jobs, accuracy_workers
from penstock.evaluate.accuracy_cells import Cell, accuracy_table, not_run, summarise
from penstock.evaluate.accuracy_jobs import Examination, Job
from penstock.evaluate.accuracy_settings import parse_setting, parse_settings
from penstock.evaluate.accuracy_workers import run_jobs
from penstock.evaluate.answers import (
    Answers,
    Question,
    SharedPrefill,
    WrongAlready,
    answer,
    ask,
)
from penstock.evaluate.tasks import GeneratedTasks, Sample
from penstock.evaluate.tasks.recall import DEFAULT_TASKS
from penstock.methods import FlexGen, Full, KVSwap
from penstock.models.loader import LoadedModel, load
from tests.ready_process import forks


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(dtype="float32")


@pytest.fixture(autouse=True, scope="module")
def _loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(accuracy_jobs, "load", functools.cache(load))
        yield


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows every answer, for tests of who is asked."""

    def know(loaded: LoadedModel, question: Question, *_: Any, **__: Any) -> Answers:
        return Answers(
            texts=[sample.answer for sample in question.samples], seconds=0.1, tokens=9,
            read_bytes=0, units_wanted=0, units_hit=0, ledger_bytes=100, full_cache_bytes=1300,
        )  # fmt: skip

    monkeypatch.setattr(accuracy_jobs, "answer", know)
    monkeypatch.setattr(accuracy_jobs, "SharedPrefill", lambda *_: None)


def draw_samples(
    loaded: LoadedModel, task: str, first: int, count: int, *, tokens: int, seed: int
) -> list[Sample]:
    assert loaded.tokenizer is not None
    return GeneratedTasks(loaded.tokenizer).draw(task, first, count, tokens=tokens, seed=seed)


def test_settings() -> None:
    text = ["full,kvswap@1/13:group_tokens=8,window_tokens=0; flexgen@2MiB", "kvswap:rank=none"]
    full, small, flexgen, free = parse_settings(text)
    assert (full.policy, full.memory) == (Full(), None)
    assert (small.policy, small.memory) == (KVSwap(group_tokens=8, window_tokens=0), "1/13")
    assert (flexgen.policy, flexgen.memory) == (FlexGen(), "2MiB")
    assert (free.policy, free.memory) == (KVSwap(rank=None), None)
    assert parse_setting("kvswap:predict=false,attend=selected").policy == KVSwap(
        predict=False, attend="selected"
    )
    assert len(parse_settings(["ablations"])) > 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic@1/2", "no policy"),
        ("kvswap@1/2:speed=9", "no option 'speed'"),
        ("kvswap:group_tokens", "no option"),
        ("kvswap:group_tokens=0", "at least 1"),
        ("kvswap:group_tokens=four", "cannot read"),
        (" , ", "no setting"),
    ],
)
def test_bad_settings(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings([text])


def test_sharing_a_prefill_changes_no_answer(loaded: LoadedModel) -> None:
    samples = [
        *draw_samples(loaded, "single_noise", 0, 1, tokens=240, seed=1),
        *draw_samples(loaded, "single_essay", 0, 1, tokens=200, seed=1),
    ]  # of different lengths: one is padded
    question = ask(loaded, samples)
    assert int(question.batch.attention_mask.sum()) < question.batch.attention_mask.numel()
    shared = SharedPrefill(loaded.model, question, 100)
    for text in ("full", "kvswap@1/2:selected_tokens=48"):
        setting = parse_setting(text)
        pair = [
            answer(loaded, question, setting, chunk=100, shared=s, store="memory")
            for s in (shared, None)
        ]
        assert pair[0].texts == pair[1].texts
        assert pair[0].tokens == pair[1].tokens


WHOLE = (
    "--tokens=210,230", "--samples=2", "--batch=2", "--tasks=single_essay,single_noise",
    "--settings=full,kvswap@1/2,kvswap@1/999", "--disk=memory",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A result in one process, as its file has it, and what was printed."""
    out, printed = tmp_path_factory.mktemp("accuracy") / "toy.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        accuracy.run([*WHOLE, "--workers=1", f"--out={out}", "--json"])
    saved: dict[str, Any] = json.loads(out.read_text())
    return saved, printed.getvalue()


def test_a_run(whole: tuple[dict[str, Any], str]) -> None:
    saved, printed = whole
    assert json.loads(printed.splitlines()[-1]) == saved
    cells = saved["figures"]["cells"]
    assert [len(cell["scores"]) for cell in cells] == [2, 2, 2, 2, 0, 0] * 2
    assert saved["figures"]["summary"][0]["mean"] >= 0.5
    assert "too little" in cells[-1]["refused"]
    assert {cell["setting"] for cell in saved["figures"]["not_run"]} == {"kvswap@1/999"}
    assert "kvswap@1/999  memory=" in printed
    assert "not run" not in printed, "what is refused stands in the table"


@pytest.mark.usefixtures("knowing")
def test_an_interrupted_run_is_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "half.json"
    arguments = [
        "--tokens=220", "--samples=3", "--batch=1", "--tasks=single_essay", "--disk=memory",
        "--settings=full,kvswap@1/2", f"--out={out}",
    ]  # fmt: skip
    real, calls = vars(accuracy_jobs)["answer"], 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(accuracy_jobs, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accuracy.run(arguments)
    half = json.loads(out.read_text())["figures"]["cells"]
    assert [len(cell["scores"]) for cell in half] == [2, 1]
    calls = 10
    accuracy.run([*arguments, "--resume"])
    assert calls == 13, "what was answered is not asked again"
    whole = json.loads(out.read_text())["figures"]["cells"]
    assert [len(cell["scores"]) for cell in whole] == [3, 3]
    assert capsys.readouterr().err.splitlines()[-1].startswith("100%")
    with pytest.raises(ConfigError, match="cannot resume"):
        accuracy.run([*arguments, "--resume", "--seed=1"])
    with pytest.raises(ConfigError, match=r"cannot resume.*dtype=None, not bfloat16"):
        accuracy.run([*arguments, "--resume", "--dtype=bfloat16"])
    with pytest.raises(ConfigError, match="kvswap@1/2, single_essay, 220 tokens, which"):
        accuracy.run([*arguments[:4], "--settings=full", arguments[-1], "--resume"])
    assert json.loads(out.read_text())["figures"]["cells"] == whole


def test_workers_answer_as_one_process_does(
    whole: tuple[dict[str, Any], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And they say how far prompts are read before the first answer.

    The libraries are imported once for both; tests/cli/test_current_folder.py starts one anew.
    """
    context = forks()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    out = tmp_path / "spread.json"
    spread = accuracy.run([*WHOLE, "--workers=2", f"--out={out}"]).figures["cells"]
    told = capsys.readouterr().err.splitlines()
    for task in ("single_essay", "single_noise"):
        ours = [line for line in told if task in line]
        first = min(number for number, line in enumerate(ours) if "took" in line)
        assert any("the prompts are being read" in line for line in ours[:first])
        assert any("is refused" in line for line in ours), "by which worker, and when, is chance"
    alone = whole[0]["figures"]["cells"]
    # A worker has fewer threads, and other sums choose otherwise between near scores.
    nearly = ("read_bytes", "units_hit")
    skipped = dict.fromkeys(("seconds", "ledger_bytes", *nearly), 0)
    assert [{**cell, **skipped} for cell in alone] == [{**cell, **skipped} for cell in spread]
    for name in nearly:
        found = [cell[name] for cell in spread]
        assert found == pytest.approx([cell[name] for cell in alone], rel=0.05), name
    assert {cell["length"] for cell in spread} == {210, 230}
    summary = json.loads(out.read_text())["figures"]["summary"]
    assert [(s["length"], s["setting"]) for s in summary[:4]] == [
        (210, "full"), (210, "kvswap@1/2"), (210, "kvswap@1/999"), (230, "full"),
    ]  # fmt: skip


def test_it_says_how_far_prompts_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first answer; workers have the module's own pace."""
    monkeypatch.setattr(accuracy_jobs, "_TELL_S", 0.0)
    accuracy.run(
        ["--tokens=300", "--samples=1", "--tasks=single_essay,multi_value", "--settings=full",
         "--disk=memory", "--chunk=100", "--workers=1"]
    )  # fmt: skip
    told = capsys.readouterr().err.splitlines()
    for task in ("single_essay", "multi_value"):
        ours = [line for line in told if task in line]
        assert "the prompts are being read" in ours[0]
        assert "took" in ours[-1]
        assert "100 of 3" in ours[1]
        assert "tokens read" in ours[1]


JOB = Job(length=300, task="single_essay", first=0, count=1, settings=("full",))


HOW = Examination(
    model="recall", device="cpu", dtype=None, data=None, haystack=(), chat=False, chunk=100,
    own_prefill=False, store="memory", seed=0,
)  # fmt: skip


def run_as(process: Callable[..., Any], queues: Callable[[], Any], job: Job) -> None:
    """Do a job in one process of another kind."""
    context = SimpleNamespace(Process=process, Queue=queues)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(multiprocessing, "get_context", lambda _: context)
        patched.setattr(accuracy_workers, "_LOOK_S", 0.1)
        run_jobs([[job]], HOW, 1, lambda *_: None, lambda _: None)


class Thread(threading.Thread):
    """In place of a process, which would import torch and the model's library."""

    exitcode, terminate = None, threading.Thread.join


def test_what_a_worker_cannot_do_is_told() -> None:
    with pytest.raises(PenstockError, match="no policy 'magic'"):
        run_as(Thread, queue.Queue, replace(JOB, settings=("magic",)))


def test_a_worker_that_dies_is_an_error_not_a_wait() -> None:
    spawn = multiprocessing.get_context("spawn")

    def dying(**others: Any) -> Any:
        return spawn.Process(target=os._exit, args=(7,), daemon=True)

    with pytest.raises(PenstockError, match=r"code 7.*--resume"):
        run_as(dying, spawn.Queue, JOB)


def test_long_answers_end_where_they_cannot_be_right_any_more(loaded: LoadedModel) -> None:
    sample = draw_samples(loaded, "copy", 0, 1, tokens=600, seed=2)[0]
    assert sample.is_all_or_nothing
    assert not draw_samples(loaded, "multi_value", 0, 1, tokens=600, seed=2)[0].is_all_or_nothing
    question = ask(loaded, [sample, replace(sample, answer="amber acorn " * 30)])
    stop = WrongAlready(question, loaded.tokenizer)
    assert loaded.tokenizer is not None
    right = loaded.tokenizer(sample.answer, add_special_tokens=False).input_ids
    prompt = question.batch.input_ids
    for count in (7, 8, len(right) // 8 * 8):
        ids = torch.cat([prompt, torch.tensor([right[:count]] * 2)], dim=1)
        assert stop(ids, None).tolist() == [False, count >= 8]


def test_files_are_tasks_too(loaded: LoadedModel, tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    sample = draw_samples(loaded, "single_essay", 0, 1, tokens=200, seed=3)[0]
    record = {"context": sample.prompt, "question": "", "answers": [sample.answer]}
    data.write_text(json.dumps(record) + "\n")
    result = accuracy.run(
        [f"--data={data}", "--samples=5", "--tokens=220", "--settings=full", "--disk=memory"]
    )
    assert [len(cell["scores"]) for cell in result.figures["cells"]] == [1]


@pytest.mark.usefixtures("knowing")
def test_no_sample_is_asked_twice(loaded: LoadedModel, tmp_path: Path) -> None:
    """A file with fewer samples than a batch; then more samples than half a batch, gone on with."""
    data, out = tmp_path / "own.jsonl", tmp_path / "out.json"
    samples = draw_samples(loaded, "single_essay", 0, 2, tokens=200, seed=3)
    records = [{"context": s.prompt, "question": "", "answers": [s.answer]} for s in samples]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--tokens=220", "--batch=5", "--settings=full", "--disk=memory", f"--out={out}"]
    of_file = [*arguments, f"--data={data}", "--samples=5"]
    for more in ([], ["--resume"]):
        result = accuracy.run([*of_file, *more])
        assert [len(cell["scores"]) for cell in result.figures["cells"]] == [2]
    out.unlink()
    generated = [*arguments, "--tasks=single_essay", "--resume"]
    accuracy.run([*generated, "--samples=1"])
    result = accuracy.run([*generated, "--samples=3"])
    assert [len(cell["scores"]) for cell in result.figures["cells"]] == [3]
    result = accuracy.run([*generated, "--settings=kvswap@1/2", "--samples=4"])
    assert [len(cell["scores"]) for cell in result.figures["cells"]] == [4, 4]


@pytest.mark.parametrize(
    ("asked", "more"),
    [("all", ()), ("all,long_walk,copy", ("long_walk",)), ("long_walk,all", ("long_walk",))],
)
def test_all_tasks_are_those_that_the_bundled_model_answers(
    asked: str, more: tuple[str, ...]
) -> None:
    arguments = [f"--tasks={asked}", "--samples=1", "--tokens=300", "--settings=full"]
    cells = accuracy.Benchmark(accuracy.parse_arguments(arguments)).cells
    order = (*more, *DEFAULT_TASKS) if asked.startswith("long") else (*DEFAULT_TASKS, *more)
    assert tuple(cell.task for cell in cells) == order


def test_a_task_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'count_words'.*long_walk"):
        accuracy.run(["--tasks=all,count_words", "--settings=full"])


def test_the_time_limit_says_what_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--tokens=300", "--samples=1", "--tasks=single_essay", "--settings=full", "--minutes=-1",
    ]  # fmt: skip
    result = accuracy.run(arguments)
    assert result.figures["not_run"][0]["why"] == "time was up"
    assert "0 of 1 samples of 300 tokens (time was up)" in capsys.readouterr().out


def test_samples_do_not_depend_on_the_batches(loaded: LoadedModel) -> None:
    both = draw_samples(loaded, "single_essay", 0, 2, tokens=300, seed=7)
    last = draw_samples(loaded, "single_essay", 1, 1, tokens=300, seed=7)
    assert both[1:] == last
    assert both[0] != both[1]


def cell(task: str, setting: str, scores: list[float]) -> Cell:
    return Cell(task=task, setting=setting, scores=scores, any_order=scores)


def test_losses_are_means_over_tasks_of_paired_samples() -> None:
    cells = [
        cell("a", "full", [1, 1, 1, 1]),
        cell("b", "full", [1, 0]),
        cell("a", "kvswap@1/13", [1, 1, 1, 0]),
        cell("b", "kvswap@1/13", [1, 0]),
    ]
    full, ours = summarise(cells)
    assert (full.loss, full.loss_error) == (0, 0)
    assert ours.loss == pytest.approx(12.5)
    assert ours.mean == pytest.approx((0.75 + 0.5) / 2)
    assert ours.loss_error == pytest.approx(100 * (0.25 / 4) ** 0.5 / 2)
    assert ours.loss_low is not None
    assert ours.loss_high is not None
    assert ours.loss_low <= 12.5 <= ours.loss_high
    assert "12.5 [0.0, " in accuracy_table(cells)
    assert not_run(cells, 4)[0]["samples"] == 2
