"""Tokenizers for the English tasks, made here or bundled: nothing is downloaded."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import penstock.models
from penstock.devices.measure import Cell, measure_reads
from penstock.evaluate import decode_loop, read_burst, throughput
from penstock.evaluate.tasks.english.filler import prose
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.real import registry
from penstock.evaluate.tasks.real.ground import grounds_of
from penstock.evaluate.tasks.real.repository import Repository
from penstock.evaluate.tasks.real.texts import read_shipped_texts
from penstock.storage.measured_directory import DirectoryMeasurement, measure_directory

SHIPPED: dict[str, Callable[..., Any]] = {
    "read_shipped_texts": functools.cache(read_shipped_texts),
    "grounds_of": functools.cache(grounds_of), "Repository": functools.cache(Repository),
}  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}<{{ turn.role }}>\n{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


class Letters:
    """Not of Hugging Face: two characters a token, and one token in front."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        pairs = [text[start : start + 2] for start in range(0, len(text), 2)]
        return [0] * add_special_tokens + [1 + ord(pair[0]) for pair in pairs]


@pytest.fixture(scope="session")
def bpe() -> TextTokenizer:
    """Byte-level BPE with a `<s>` in front and a chat template, as most models have it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(prose(random.Random(0)).take(400), trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer: TextTokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )  # fmt: skip
    return tokenizer


@pytest.fixture(scope="session")
def bundled() -> TextTokenizer:
    """The bundled model's word-level tokenizer; most English words are unknown to it."""
    folder = Path(penstock.models.__file__).parent / "recall"
    tokenizer: TextTokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer


@pytest.fixture(params=["bpe", "bundled", "letters"])
def any_tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    if request.param == "letters":
        return Letters()
    tokenizer: TextTokenizer = request.getfixturevalue(request.param)
    return tokenizer


@pytest.fixture(scope="module")
def shipped_once() -> Iterator[None]:
    """To read and parse the texts of suite real takes most of a second."""
    with pytest.MonkeyPatch.context() as patched:
        for name, made in SHIPPED.items():
            patched.setattr(registry, name, made)
        yield


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are timed for less: the figures need not be good."""

    def few_reads(*args: Any, seconds_per_cell: float, **more: Any) -> Iterator[Cell]:
        return measure_reads(*args, seconds_per_cell=0.0, **more)

    def few_cells(store: str, *, file_bytes: int, seconds_per_cell: float) -> DirectoryMeasurement:
        return measure_directory(store, file_bytes=file_bytes, seconds_per_cell=0.0)

    monkeypatch.setattr(read_burst, "ROUNDS", 1)
    monkeypatch.setattr(read_burst, "measure_reads", few_reads)
    monkeypatch.setattr(decode_loop, "WARM_STEPS", 1)
    monkeypatch.setattr(throughput, "measure_directory", few_cells)
