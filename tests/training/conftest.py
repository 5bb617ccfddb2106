"""A small corpus for the tests of prose runs, and a run of a few short steps."""

import json
import lzma
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import training
from penstock.evaluate.tasks.english.filler import prose
from training.checkpoint import read_vocabulary
from training.corpus import prepare
from training.data import Batch, RowMaker
from training.prose_settings import ProseSettings
from training.run_settings import read_run_settings
from training.settings import Settings, read_settings
from training.trainer import Trainer

CONFIGS = Path(training.__file__).parent / "configs"
TOY, PROSE_TOY = CONFIGS / "toy.toml", CONFIGS / "prose-toy.toml"
VOCABULARY = read_vocabulary()
HELD_BACK = "The text that is held back is about a heron."


def paragraphs(seed: int, count: int) -> str:
    rng = random.Random(seed)
    some = [" ".join(prose(rng).take(rng.randint(2, 9))) for _ in range(count)]
    some.insert(
        1, "A verse\nof two lines.\n\n1. Mr. T. Brown came in 1851. \"Is it?\" He said: 'No.'"
    )
    some.insert(2, "Ten € and <eos> naïve\u00a0words  with odd    spaces.\n\n\n  code = [1, 2]")
    return "\n\n".join(some)


def write_documents(path: Path, texts: list[str]) -> None:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            record = {"id": f"{path.name}-{number}", "source": "s", "licence": "CC0", "text": text}
            file.write(json.dumps(record) + "\n")


@pytest.fixture(scope="session")
def prose_texts() -> list[str]:
    """Two long documents, six short ones and one to be held back."""
    short = [paragraphs(seed, 3) for seed in range(3, 9)]
    return [paragraphs(1, 150), paragraphs(2, 120), *short, "\n\n".join([HELD_BACK] * 60)]


@pytest.fixture(scope="session")
def prose_source(prose_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to give as --corpus; its holdout is not readable as one."""
    folder = tmp_path_factory.mktemp("source")
    write_documents(folder / "books.jsonl.xz", prose_texts[:2])
    write_documents(folder / "docs.jsonl.xz", prose_texts[2:])
    (folder / "holdout.jsonl.xz").write_bytes(b"not to be opened")
    return folder


@pytest.fixture(scope="session")
def prose_corpus(prose_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the toy of prose runs makes of it. Read only."""
    settings = read_run_settings(PROSE_TOY)
    assert isinstance(settings, ProseSettings)
    folder = tmp_path_factory.mktemp("prepared") / "corpus"
    prepare(prose_source, folder, settings.corpus, settings.model.positions, print)
    return folder


class ToyRun:
    """A run of six short steps: its settings, its batches, and what a trainer has learnt."""

    @staticmethod
    def small() -> Settings:
        settings = read_settings(TOY)
        stages = (replace(settings.stages[0], steps=3), replace(settings.stages[1], steps=3))
        plan = replace(settings.optimizer, warmup_steps=2, decay_steps=2)
        return replace(settings, micro_batch_tokens=512, stages=stages, optimizer=plan)

    @staticmethod
    def batches_of(settings: Settings) -> list[list[Batch]]:
        maker, each = RowMaker(settings, VOCABULARY), settings.micro_batches
        return [
            [maker.batch(step * each + micro) for micro in range(each)]
            for step in range(settings.steps)
        ]

    @staticmethod
    def parameters(trainer: Trainer) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.fixture
def toy() -> type[ToyRun]:
    return ToyRun
