"""A document's life, step by step: whatever came before, it answers as the plain model does."""

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from transformers import DynamicCache, PreTrainedModel

from penstock import KVSwap, SamplingParams, TieredCache
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

GROUP_TOKENS, NEW_TOKENS, LAYERS, UNIT_BYTES = 8, 4, 3, 4096
# All tokens are selected, so that kept answers are what the plain model computes too.
POLICY = KVSwap(group_tokens=GROUP_TOKENS, window_tokens=16, selected_tokens=10**6)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
SETTINGS = DocumentSettings(store="memory", memory=None, prefill_chunk_size=64)
Seeds = st.integers(0, 999)


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama")


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def continued(tokens: list[int], past: DynamicCache | TieredCache) -> list[int]:
    """What the model says behind `tokens`, the beginning of which `past` may hold."""
    whole, any_model = torch.tensor([tokens]), model()
    generate: Any = any_model.generate
    out = generate(
        input_ids=whole, attention_mask=torch.ones_like(whole), **cache_argument(generate, past),
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    new: list[int] = out[0, len(tokens) :].tolist()
    return new


def plain(tokens: list[int]) -> list[int]:
    return continued(tokens, DynamicCache())


class DocumentMachine(RuleBasedStateMachine):
    """A document, and the list of tokens that it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "document"
        self.document: Document
        self.tokens: list[int] = []
        self.damaged: set[tuple[int, int]] = set()
        """(layer, group)"""

    @initialize(length=st.integers(1, 150), seed=Seeds)
    def add(self, length: int, seed: int) -> None:
        self.tokens = ids(length, seed)
        self.document = Document.create(
            model(), self.tokens, self.folder, policy=POLICY, memory=None, settings=SETTINGS
        )

    @rule(seed=Seeds, count=st.integers(1, 2))
    def ask(self, seed: int, count: int) -> None:
        questions = [ids(5, seed + i) for i in range(count)]
        outputs = self.document.ask(questions, GREEDY, exact=True)
        for question, output in zip(questions, outputs, strict=True):
            assert output.token_ids == plain([*self.tokens, *question])
        assert outputs[0].run.recomputed_tokens == self.lost_tokens()
        self.damaged.clear()

    @rule(seed=Seeds)
    def keep(self, seed: int) -> None:
        question = ids(5, seed)
        [output] = self.document.ask([question], GREEDY, keep=True)
        assert output.token_ids == plain([*self.tokens, *question])
        self.tokens += [*question, *output.token_ids]
        self.document.recover()  # of what it did not read
        self.damaged.clear()

    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), offset=st.integers(0, UNIT_BYTES - 1))
    def damage(self, data: st.DataObject, layer: int, offset: int) -> None:
        units = self.document._opened.groups
        group = data.draw(st.integers(0, len(units) - 1))
        if (layer, group) in self.damaged:
            return
        with (self.folder / f"kv-{layer}.units").open("r+b") as file:
            file.seek(int(units[group]) * UNIT_BYTES + offset)
            [byte] = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x40]))
        self.damaged.add((layer, group))

    @rule()
    def verify(self) -> None:
        found = self.document.verify()
        units = self.document._opened.groups.tolist()
        lost = {(layer, units.index(unit)) for layer in found.units for unit in found.units[layer]}
        assert lost == self.damaged
        assert bool(found) == bool(self.damaged)

    @rule()
    def recover(self) -> None:
        generation = self.document.generation
        recovery = self.document.recover()
        assert recovery.recomputed_tokens == self.lost_tokens()
        assert self.document.generation == generation + bool(self.damaged)
        self.damaged.clear()
        assert not self.document.verify()

    @rule()
    def reopen(self) -> None:
        self.document.close()
        self.document = Document.open(model(), self.folder, settings=SETTINGS)
        assert self.document.written_bytes == 0

    @precondition(lambda self: not self.damaged)
    @rule(seed=Seeds)
    def fork(self, seed: int) -> None:
        texts = [[*self.tokens, *ids(5, seed + i)] for i in range(2)]
        with (
            self.document.cache(new_tokens=40, exact=True) as one,
            self.document.cache(new_tokens=40, exact=True) as two,
        ):
            for tokens, each in zip(texts, (one, two), strict=True):
                answer = continued(tokens, each)
                assert answer == plain(tokens)
                tokens += answer
            more = [*texts[0], *ids(3, seed)]
            assert continued(more, one) == plain(more), "the other one is not in the way"

    @invariant()
    def the_tokens_are_there(self) -> None:
        assert [*self.document.tokens, *self.document.about.pending] == self.tokens
        assert self.document.about.tokens == len(self.document.tokens)

    def lost_tokens(self) -> int:
        length = self.document.about.tokens
        groups = {group for _, group in self.damaged}
        return sum(min(GROUP_TOKENS, length - group * GROUP_TOKENS) for group in groups)

    def teardown(self) -> None:
        if self.tokens:
            self.document.close()
        shutil.rmtree(self.folder.parent)


TestDocument = DocumentMachine.TestCase
TestDocument.settings = settings(max_examples=4, stateful_step_count=8, deadline=None)
