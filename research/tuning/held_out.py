"""Quality of settings on text that no lookup table was made from: held-out documents."""

import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.engine.adapter import LowRankAdapter
from penstock.evaluate.progress import Progress
from penstock.evaluate.sitting import say
from penstock.evaluate.tasks.recall import make_sample
from penstock.generation.prompts import encode
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.models.loader import LoadedModel
from penstock.tuner.fidelity import Reference
from penstock.tuner.journal import Journal

TASKS = ("copy", "pointer_chasing", "two_walkers")
"""Their answers are long; a document of each in turn. Bad settings lose copies first."""
_MOST_DRAWN = 50


def held_out_texts(
    loaded: LoadedModel, *, tokens: int, forced: int, count: int, seed: int
) -> list[Tensor]:
    """Documents with a question and the beginning of its true answer, for the bundled model.

    Calibration texts come from a seed of their own, which is none of these.

    Args:
        tokens: most of a text, answer included.
        forced: tokens of the answer that are kept, one word each.

    Returns:
        int64. [count][tokens]

    Raises:
        ConfigError: `tokens` is too short for a task, or its answers for `forced`.
    """
    assert loaded.tokenizer is not None
    vocabulary = loaded.tokenizer.get_vocab()
    texts = []
    for number in range(count):
        task = TASKS[number % len(TASKS)]
        rng = random.Random(f"penstock bench tune/{seed}/{number}")
        texts.append(torch.tensor(encode(loaded, _text(task, tokens, forced, rng, vocabulary))))
    return texts


def _text(
    task: str, tokens: int, forced: int, rng: random.Random, vocabulary: dict[str, int]
) -> str:
    for _ in range(_MOST_DRAWN):
        sample = make_sample(task, tokens - forced, rng, vocabulary)
        answer = sample.answer.split()
        if len(answer) >= forced:
            return " ".join([sample.prompt, *answer[:forced]])
    raise ConfigError(
        f"answers of {task} at {tokens:,} tokens have fewer than {forced}; give a smaller --forced"
    )


class HeldOutQuality:
    """Settings held to full attention on held-out documents, each once, whatever the device."""

    def __init__(
        self, loaded: LoadedModel, adapter: LowRankAdapter, texts: Sequence[Tensor], *,
        forced: int, journal: Journal,
    ) -> None:  # fmt: skip
        """
        Args:
            texts: of `held_out_texts`; read when something is to be measured.
            forced: tokens at the end of each that are decoded under a setting.
            journal: of nothing else.
        """
        self._loaded, self._adapter, self._texts = loaded, adapter, texts
        self._forced, self.journal = forced, journal
        self._about = {"forced": forced, "texts": [len(text) for text in texts]}
        self._reference: Reference | None = None
        self.found: dict[str, dict[str, float]] = {}
        """KL, its 90th percentile and agreement, by `quality_key`."""

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self._texts)

    def measure(self, policies: Sequence[KVSwap]) -> None:
        """Add settings, with all choices made, to `found`; known ones are not run again."""
        wanted = {quality_key(fields_of(each)): each for each in policies}
        todo = [key for key in wanted if not self.journal.knows(self._key(key))]
        progress = Progress(len(wanted))
        progress.skip(len(wanted) - len(todo))
        for key in todo:
            if self._reference is None:
                say("full attention over the held-out text")
                model = self._loaded.model
                self._reference = Reference(model, self._texts, forced=self._forced)
            progress.say("quality on held-out text")
            found = self._reference.measure(wanted[key], memory=None, adapter=self._adapter)
            values = {"kl": found.kl, "kl_p90": found.kl_p90, "agreement": found.agreement}
            self.journal.note(self._key(key), values)
            progress.step(1)
        self.found |= {key: self.journal.recall(self._key(key)) for key in wanted}

    def _key(self, setting: str) -> dict[str, Any]:
        return {**self._about, "setting": setting}

    def summary(self, floor: float) -> dict[str, Any]:
        """What was measured on what, for a result."""
        return {
            "guard": "KL from full attention on held-out documents, mean in nats",
            **self._about, "settings": len(self.found),
            "within_floor": sum(each["kl"] <= floor for each in self.found.values()),
        }  # fmt: skip


def quality_key(fields: dict[str, Any]) -> str:
    """A setting's fields as one text."""
    return json.dumps(fields, sort_keys=True)
