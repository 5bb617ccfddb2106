"""The bench's English questions in held-out prose, as token ids for one tokenizer."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import Sample, make_english_sample
from penstock.evaluate.tasks.english.haystack import TextHaystack
from penstock.evaluate.tasks.english.needles import NEEDLE_KINDS
from training.asked import Asker, Job
from training.corpus import read_documents

ANY_ORDER = frozenset({"common_words"})
"""Tasks whose right answers nothing puts in an order."""
HOLDOUT = "holdout.jsonl.xz"
_PIECE_STARTS = re.compile(r"(?<=[.!?,;:])(?= \S)|(?<=\S)(?=\n)")
_PROBE_CHARACTERS = 50_000
_REMEMBERED = 50_000


class PlainTokenizer:
    """A `tokenizer.json` without transformers, which takes seconds to start in every process.

    Raises:
        ConfigError: there is none in the folder.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        """Token ids; see `TextTokenizer`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_text(self, text: str) -> Sequence[int]:
        """Ids of a corpus's text, in which nothing is a special token."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False


class PieceTokenizer(PlainTokenizer):
    """The same, quick where texts share most of their sentences, as when a prompt is fitted.

    It remembers tokens of pieces that begin with white space behind something else. A byte-level
    token never goes on over such a place; where another kind of tokenizer gives other tokens for a
    text's pieces than for the whole, nothing is cut.

    Args:
        folder: with the tokenizer.
        probe: a text of the kind that is to come.
    """

    def __init__(self, folder: Path, probe: str) -> None:
        super().__init__(folder)
        self._remembered: dict[str, Sequence[int]] = {}
        self._front = super().encode("")
        self._cuts = self._in_pieces(probe) == list(super().encode(probe))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        """Token ids; see `TextTokenizer`."""
        if self._cuts and add_special_tokens:
            return self._in_pieces(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def _in_pieces(self, text: str) -> list[int]:
        if len(self._remembered) > _REMEMBERED:
            self._remembered.clear()
        ids = list(self._front)
        for piece in _PIECE_STARTS.split(text):
            known = self._remembered.get(piece)
            if known is None:
                known = super().encode(piece, add_special_tokens=False)
                self._remembered[piece] = known
            ids += known
        return ids


def read_holdout(corpus: Path) -> list[str]:
    """The held-out documents of a corpus.

    Raises:
        ConfigError: there are none.
    """
    texts = [document.text for document in read_documents(corpus / HOLDOUT)]
    if not texts:
        raise ConfigError(f"{corpus / HOLDOUT} is empty")
    return texts


def english_asker(model: Path, corpus: Path, seed: int, keep: int) -> Asker:
    """Samples of `ENGLISH_TASKS` with held-out prose for a haystack where a task has one."""
    texts = read_holdout(corpus)
    tokenizer = PieceTokenizer(model, texts[0][:_PROBE_CHARACTERS])
    haystack = TextHaystack(texts)

    def draw(job: Job) -> Sample:
        rng = random.Random(f"{seed}/{job.task}/{job.tokens}/{job.number}")
        return make_english_sample(job.task, job.tokens, rng, tokenizer, haystack=haystack)

    def encode(sample: Sample) -> tuple[Sequence[int], Sequence[int]]:
        answer = tokenizer.encode(answer_in_order(sample), add_special_tokens=False)
        return tokenizer.encode(sample.prompt), answer

    return Asker(draw, encode, keep, ANY_ORDER)


def answer_in_order(sample: Sample) -> str:
    """The answer, with all values of one key in the order in which the document tells them.

    The question leaves the order open and the bench does not look at it; training answers so.
    """
    if sample.task not in NEEDLE_KINDS or NEEDLE_KINDS[sample.task].values == 1:
        return sample.answer
    return f" {', '.join(sorted(sample.values, key=sample.prompt.index))}."
