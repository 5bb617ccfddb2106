"""A trainer of prose runs: what it looks at during the run."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import Haystack, prose
from penstock.evaluate.tasks.english.haystack import TextHaystack
from penstock.evaluate.tasks.english.registry import make_english_sample
from training.corpus import Corpus
from training.data import BOS, EOS
from training.model import Pieces, attention_backend, guess_logits, hidden_states
from training.prose_settings import ProseSettings
from training.trainer import GLANCE_SEED, Trainer

GLANCE_TASKS = ("single_2", "multi_key_1", "multi_key_2")
_ROWS_HELD_BACK = 4


class ProseTrainer(Trainer):
    """A model in training on a prepared corpus.

    Args:
        settings: of the run.
        folder: of the corpus, with the tokenizer.
        device: see `Trainer`.

    Raises:
        TrainingError: see `Trainer`.
    """

    def __init__(self, settings: ProseSettings, folder: Path, device: torch.device) -> None:
        self._corpus = Corpus.open(folder)
        inner = self._corpus.tokenizer()
        super().__init__(settings, inner.get_vocab(), device)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        count = len(self._corpus.documents) - 1
        kept = range(count - settings.corpus.held_back, count)
        texts = [self._corpus.text(inner, document) for document in kept]
        self._haystack: Haystack = TextHaystack(texts) if texts else prose
        start = int(self._corpus.documents[count - settings.corpus.held_back])
        self._held_back = self._corpus.tokens[start:]
        self._samples: dict[tuple[str, int], list[tuple[list[int], list[int]]]] = {}

    def glance(self) -> Iterator[tuple[str, int, float, float]]:
        """Exact match on a few fresh samples in text that is held back (in made-up prose if none
        is): task, prompt tokens, exact share, token share."""
        for length in self._lengths():
            for task in GLANCE_TASKS:
                exact = right = tokens = 0
                asked = self._asked(task, length)
                for prompt, answer in asked:
                    ids = torch.tensor([[*prompt, *answer]], device=self._device)
                    with torch.no_grad():
                        guessed = self._guess(ids, len(answer)).tolist()
                    hits = sum(a == b for a, b in zip(guessed, answer, strict=True))
                    exact += hits == len(answer)
                    right += hits
                    tokens += len(answer)
                if asked:
                    yield task, length, exact / len(asked), right / tokens

    @torch.no_grad()
    def held_back_loss(self) -> dict[str, float]:
        """Mean cross entropy of the held-back documents' tokens, by the length of the row."""
        losses = {}
        for length in self._lengths():
            room = len(self._held_back) // (length - 1)
            found = []
            for row in range(min(_ROWS_HELD_BACK, room)):
                chunk = self._held_back[row * (length - 1) : (row + 1) * (length - 1)]
                ids = torch.tensor([[BOS, *chunk.tolist()]], device=self._device)
                positions = torch.arange(length, device=self._device)[None]
                with attention_backend(self._glance_attention):
                    hidden = hidden_states(self.model, ids, positions, Pieces.plain(), self._dtype)
                places = torch.arange(length - 1, device=self._device)
                logits = guess_logits(self.model, hidden, places)
                found.append(float(functional.cross_entropy(logits, ids[0, 1:])))
            if found:
                losses[str(length)] = sum(found) / len(found)
        return losses

    def _lengths(self) -> list[int]:
        reached = max(self._settings.stage_at(max(0, self.steps_done - 1)).lengths)
        return [length for length in self._settings.evaluation.lengths if length <= reached]

    def _asked(self, task: str, length: int) -> list[tuple[list[int], list[int]]]:
        """Prompts and answers in tokens; none where the task does not fit."""
        if (task, length) not in self._samples:
            try:
                self._samples[task, length] = [
                    self._sample(task, length, n) for n in range(self._settings.evaluation.samples)
                ]
            except ConfigError:
                self._samples[task, length] = []
        return self._samples[task, length]

    def _sample(self, task: str, length: int, number: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"{GLANCE_SEED}/{task}/{length}/{number}")
        sample = make_english_sample(task, length, rng, self._tokenizer, haystack=self._haystack)
        answer = self._tokenizer.encode(sample.answer, add_special_tokens=False)
        return list(self._tokenizer.encode(sample.prompt, verbose=False)), [*answer, EOS]
