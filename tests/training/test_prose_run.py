"""A prose run at toy size: learning, going on, ending in time, the folder that it leaves."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import training
from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import GeneratedTasks
from penstock.models.loader import load
from training import train
from training.checkpoint import load_checkpoint
from training.corpus import Corpus
from training.fit import Fit, stretched
from training.prose_data import ProseRowMaker
from training.prose_settings import ProseSettings
from training.prose_trainer import ProseTrainer
from training.run_settings import read_run_settings
from training.trainer import Trainer

CONFIGS = Path(training.__file__).parent / "configs"
TOY = str(CONFIGS / "prose-toy.toml")


def prepared(corpus: Path, run: Path) -> None:
    """Put a corpus where a run has its own, which it takes as it is."""
    shutil.copytree(corpus, run / "corpus")


def toy() -> ProseSettings:
    settings = read_run_settings(TOY)
    assert isinstance(settings, ProseSettings)
    return settings


@pytest.fixture(scope="module")
def finished(
    prose_source: Path, prose_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    prepared(prose_corpus, folder)
    words = [TOY, "--corpus", str(prose_source), "--out", str(folder), "--workers", "0"]
    assert train.main(words) == 0
    return folder


def test_loss_falls(finished: Path) -> None:
    settings = toy()
    trainer = ProseTrainer(settings, finished / "corpus", torch.device("cpu"))
    batch = ProseRowMaker(settings, finished / "corpus").batch(0)
    losses = []
    for _ in range(12):
        trainer.step([batch])
        losses.append(trainer.figures().loss)
    assert losses[0] > 5.9  # nothing known: log 512 is 6.2
    assert losses[-1] < 0.7 * losses[0]


def test_a_resumed_run_leaves_the_same_model(
    prose_source: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [TOY, "--corpus", str(prose_source), "--out", str(tmp_path / "two"), "--workers", "0"]
    prepared(finished / "corpus", tmp_path / "two")
    asked = iter([""] * 5)
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "reason", lambda self: next(asked, "the time is up"))
        assert train.main(words) == 3
    state = load_checkpoint(tmp_path / "two")
    assert state is not None
    assert state["steps_done"] == 5
    other = tmp_path / "source"
    shutil.copytree(prose_source, other)
    shutil.copyfile(other / "docs.jsonl.xz", other / "books.jsonl.xz")
    elsewhere = [str(other) if word == str(prose_source) else word for word in words]
    assert train.main([*elsewhere, "--resume"]) == 2, "text and tokens of another corpus"
    assert train.main([*words, "--resume"]) == 0
    weights = [
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (finished, tmp_path / "two")
    ]
    assert weights[0] == weights[1]


def test_the_finished_folder_is_a_model_of_penstock(finished: Path, prose_texts: list[str]) -> None:
    loaded = load(finished / "model")
    assert loaded.tokenizer is not None
    assert loaded.model.config.vocab_size == len(loaded.tokenizer) == 512
    tasks = GeneratedTasks(loaded.tokenizer)
    assert tasks.language == "english"
    (sample,) = tasks.draw("multi_key_1", 0, 1, tokens=900, seed=0)
    inner = Corpus.open(finished / "corpus").tokenizer()
    ids = loaded.tokenizer.encode(sample.prompt)
    assert ids == inner.encode(sample.prompt).ids
    assert ids[0] == loaded.tokenizer.bos_token_id == 1
    assert len(ids) <= 900
    assert loaded.tokenizer.eos_token_id == 2
    assert loaded.tokenizer.decode(ids[1:]) == sample.prompt
    assert loaded.tokenizer.model_max_length == 4096
    text = prose_texts[3].replace("<eos>", "")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)[1:]) == text


def test_glances_are_at_what_is_held_back(finished: Path) -> None:
    log = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    glances = [record for record in log if record["kind"] == "glance"]
    assert [record["step"] for record in glances] == [6, 12]
    assert {cell["task"] for cell in glances[-1]["exact"]} >= {"single_2"}
    assert 0 < glances[-1]["held_back"]["256"] < 8
    trained = [record for record in log if record["kind"] == "train"]
    assert "prose" in trained[-1]["by_task"]
    trainer = ProseTrainer(toy(), finished / "corpus", torch.device("cpu"))
    prompt, answer = trainer._sample("single_2", 300, 0)
    told = trainer._tokenizer.decode(prompt)
    assert "held back is about a heron" in told
    assert trainer._tokenizer.decode(answer[:-1]).strip(" .") in told


class Clock:
    """In place of `time`: every look at it takes 30 ms; busy machines are not short of steps."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.03
        return self.now


def test_a_run_fits_into_its_time(
    prose_source: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [TOY, "--corpus", str(prose_source), "--out", str(tmp_path), "--workers", "0"]
    prepared(finished / "corpus", tmp_path)
    used: list[float | None] = []
    step = Trainer.step

    def watched(self: Trainer, batches: list[object], rate: float | None = None) -> None:
        used.append(rate)
        step(self, batches, rate)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", watched)
    monkeypatch.setattr(train, "time", Clock())
    asked = iter([""] * 4)
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "reason", lambda self: next(asked, "the time is up"))
        assert train.main([*words, "--fit", "0.05"]) == 3
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert 0 < state["spent_s"] < 3
    assert train.main([*words, "--fit", "0.05", "--resume"]) == 0
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert 3 <= state["spent_s"] < 3.5
    assert state["steps_done"] == len(used) > 12
    assert used[-1] is not None
    assert used[-1] < 0.2
    assert max(rate or 0 for rate in used) == 1.0
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_rates_by_the_clock() -> None:
    fit = Fit.of(toy(), 120.0)
    assert fit.decay_s == pytest.approx(40)
    assert fit.rate(0, 1.0) == pytest.approx(1 / 3)
    assert fit.rate(50, 80.0) == 1.0
    assert fit.rate(50, 100.0) == pytest.approx(0.5)
    assert fit.rate(50, 130.0) == 0.0
    squared = replace(toy(), optimizer=replace(toy().optimizer, decay_power=2.0))
    assert Fit.of(squared, 120.0).rate(50, 100.0) == pytest.approx(0.25)
    assert Fit.of(squared, 120.0).rate(50, 130.0) == 0.0
    longer = stretched(toy())
    assert longer.stages[0] == toy().stages[0]
    assert longer.steps > 8 * toy().steps
    with pytest.raises(ConfigError, match="above 0"):
        Fit.of(toy(), 0)


def test_corpus_is_asked_for_where_it_is_needed(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path), "--workers", "0"]
    assert train.main([TOY, *out]) == 2
    assert train.main([str(CONFIGS / "toy.toml"), "--corpus", str(tmp_path), *out]) == 2
    assert train.main([TOY, "--corpus", str(tmp_path), *out]) == 2


def test_other_seeds_are_other_models(finished: Path) -> None:
    corpus = finished / "corpus"
    one = ProseTrainer(toy(), corpus, torch.device("cpu"))
    two = ProseTrainer(replace(toy(), seed=random.randint(1, 99)), corpus, torch.device("cpu"))
    assert not torch.equal(one.model.lm_head.weight, two.model.lm_head.weight)
