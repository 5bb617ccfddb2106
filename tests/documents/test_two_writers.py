"""Two that have a document open: neither loses what the other stored, nor a descriptor."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import KVSwap, SamplingParams
from penstock.core.errors import DocumentBusyError
from penstock.documents.document import Document
from penstock.documents.recovery import remake_index
from penstock.documents.settings import DocumentSettings
from penstock.generation.engine import LLM
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=5)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


TEXT, FIRST, SECOND = ids(203), ids(9, seed=1), ids(9, seed=2)
MODEL: Any = tiny_model("llama")


def add(path: Path, settings: DocumentSettings = SETTINGS, text: list[int] = TEXT) -> Document:
    policy = KVSwap(group_tokens=8, window_tokens=16, selected_tokens=48)
    return Document.create(MODEL, text, path, policy=policy, memory=None, settings=settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add(tmp_path / "d").close()
    return tmp_path / "d"


@pytest.fixture
def one(folder: Path) -> Iterator[Document]:
    with Document.open(MODEL, folder, settings=SETTINGS) as document:
        yield document


@pytest.fixture
def other(folder: Path) -> Iterator[Document]:
    with Document.open(MODEL, folder, settings=SETTINGS) as document:
        yield document


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_an_answer_is_not_kept_behind_another_text(
    one: Document, other: Document, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [kept] = other.ask([FIRST], GREEDY, keep=True)
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "answer", lambda *_, **__: pytest.fail("answered, to be thrown away"))
        with pytest.raises(DocumentBusyError, match="since it was opened; open it again"):
            one.ask([SECOND], GREEDY, keep=True)
    assert one.ask([SECOND], GREEDY), "reading goes on"
    with Document.open(MODEL, folder, settings=SETTINGS) as document:
        assert [*document.tokens, *document.about.pending] == [*TEXT, *FIRST, *kept.token_ids]
        document.ask([SECOND], GREEDY, keep=True)
        assert document.generation == 3


def test_while_one_answers_the_other_is_refused_at_once(
    one: Document, other: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Any = LLM.answer
    refused: list[str] = []

    def answer_meanwhile(*args: Any, **kwargs: Any) -> Any:
        assert not refused, "the other was answered"
        with pytest.raises(DocumentBusyError, match="is being written") as caught:
            other.ask([SECOND], GREEDY, keep=True)
        refused.append(str(caught.value))
        return answer(*args, **kwargs)

    monkeypatch.setattr(LLM, "answer", answer_meanwhile)
    one.ask([FIRST], GREEDY, keep=True)
    assert refused
    assert one.generation == 2


def test_damage_is_not_mended_behind_another_text(
    one: Document, other: Document, folder: Path
) -> None:
    other.ask([FIRST], GREEDY, keep=True)
    flip(folder / "kv-1.units", 4096 + 100)
    with pytest.raises(DocumentBusyError, match="open it again"):
        one.recover()
    with pytest.raises(DocumentBusyError, match="open it again"):
        remake_index(one._opened, {"index-1"})
    with Document.open(MODEL, folder, settings=SETTINGS) as document:
        assert document.generation == 2
        assert document.recover().recomputed_tokens == 8
        assert document.about.tokens == len(document.tokens) > len(TEXT)
        assert not document.verify()
        assert document.ask([SECOND], GREEDY)


def test_a_long_chat_holds_no_more_files(one: Document) -> None:
    def held() -> int:
        return int(psutil.Process().num_fds())

    one.ask([FIRST], GREEDY, keep=True)
    before = held()
    for seed in range(3, 7):
        one.ask([ids(9, seed=seed)], GREEDY, keep=True)
    assert held() == before


def test_a_cache_reads_on_while_answers_are_kept(one: Document) -> None:
    tokens = torch.tensor([[*TEXT, *SECOND]])

    def generate(cache: Any) -> list[int]:
        out = MODEL.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens),
            **cache_argument(MODEL, cache), max_new_tokens=GREEDY.max_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return [int(token) for token in out[0, tokens.shape[1] :]]

    with one.cache(new_tokens=64) as cache:
        expected = generate(cache)
    before = psutil.Process().num_fds()
    with one.cache(new_tokens=64) as cache:
        one.ask([FIRST], GREEDY, keep=True)
        one.ask([FIRST], GREEDY, keep=True)
        assert generate(cache) == expected
    one.ask([FIRST], GREEDY, keep=True)
    assert psutil.Process().num_fds() == before, "and lets its files go with the next answer"


def test_chunks_of_one_token_are_no_decode_steps(tmp_path: Path) -> None:
    text = TEXT[:83]

    def stored(path: Path, chunk: int) -> list[torch.Tensor]:
        settings = DocumentSettings(store="memory", prefill_chunk_size=chunk)
        with (
            add(path, settings, text) as document,
            document.cache(exact=True, new_tokens=8) as cache,
        ):
            return [cache.tiers.read_tokens(layer, 0, len(text)).clone() for layer in range(3)]

    for one, many in zip(stored(tmp_path / "a", 1), stored(tmp_path / "b", 64), strict=True):
        assert torch.allclose(one.view(torch.float32), many.view(torch.float32), atol=1e-5)
