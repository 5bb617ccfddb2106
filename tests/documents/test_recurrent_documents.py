"""A stored document of a hybrid model: its states are kept, checked, and mended by prefill."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import KVSwap, SamplingParams, TieredCache
from penstock.core.errors import CacheStateError, DocumentDamagedError
from penstock.documents.conversation import Conversation
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.testing.tiny_chat import byte_tokenizer
from penstock.testing.tiny_families import tiny_family

pytestmark = pytest.mark.skipif(
    not HAS_RECURRENT_LAYERS, reason="this transformers keeps recurrent states elsewhere"
)
POLICY = KVSwap(group_tokens=8, window_tokens=16, selected_tokens=48)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)
TEXT, QUESTION, MORE = (
    torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    for count in (107, 9, 30)
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_family("qwen3_next")


def create(model: Any, path: Path, **options: Any) -> Document:
    given = {"policy": POLICY, "memory": None, "settings": SETTINGS, "text": TEXT, **options}
    return Document.create(model, path=path, **given)


def answer(document: Document, question: list[int] = QUESTION, **options: Any) -> Any:
    [output] = document.ask([question], GREEDY, **options)
    return output


def plain(model: Any, *parts: list[int]) -> list[int]:
    """What the plain model says behind some parts."""
    ids = torch.tensor([[token for part in parts for token in part]])
    new: list[int] = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)[0]
    return [int(token) for token in new[ids.shape[1] :]]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_a_reopened_document_answers_as_the_plain_model(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    whole = KVSwap(group_tokens=8, selected_tokens=1000)
    right = plain(model, TEXT, QUESTION)
    with create(model, tmp_path / "d", policy=whole) as document:
        assert answer(document).token_ids == right
    with Document.open(model, tmp_path / "d", settings=SETTINGS) as document:
        assert [answer(document).token_ids for _ in range(2)] == [right] * 2, "forks are apart"
        assert answer(document, exact=True).token_ids == right
        assert answer(document, policy="quest", memory=None).run.restored_tokens == len(TEXT)
        ids = torch.tensor([[*TEXT, *QUESTION]] * 3)
        with document.cache(new_tokens=40, batch_size=3) as cache, torch.no_grad():
            for _ in range(2):
                out = model.generate(
                    ids, **cache_argument(model, cache), max_new_tokens=5, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
                assert out[:, ids.shape[1] :].tolist() == [right] * 3
                with pytest.raises(CacheStateError, match="recurrent layers have no state behind"):
                    cache.crop(len(TEXT) + 3)
                assert cache.rewind(len(TEXT) + 3) == len(TEXT), "its states are on the disk"
            assert cache.stats.again_tokens == 2 * 3 * 3


def test_damaged_states_are_said_and_mended(model: Any, tmp_path: Path) -> None:
    """A kept answer's state is mended from the one at the end of the text before it."""
    whole = KVSwap(group_tokens=8, selected_tokens=1000)  # what is prefilled again is exact
    with create(model, tmp_path / "d", policy=whole) as document:
        kept = answer(document, keep=True)
        length, first = document.about.tokens, answer(document).token_ids
        assert length == len(TEXT) + len(QUESTION) + 4
    [newest] = (tmp_path / "d").glob(f"blob-*-states-{length}")
    [older] = (tmp_path / "d").glob(f"blob-*-states-{len(TEXT)}")
    flip(newest)
    with Document.open(model, tmp_path / "d", settings=SETTINGS) as document:
        assert document.verify().blobs == [f"states-{length}"]
        with pytest.raises(DocumentDamagedError, match="states-"):
            document.cache()
        mended = answer(document)
        assert mended.token_ids == first
        assert mended.run.recomputed_tokens == length - len(TEXT) == len(kept.token_ids) + 8
        assert answer(document).run.recomputed_tokens == 0
        assert not document.verify()
    # Damaged units in front of the older state, and that one too.
    flip(older)
    flip(tmp_path / "d" / "kv-1.units")
    with Document.open(model, tmp_path / "d", settings=SETTINGS) as document:
        recovery = document.recover()
        assert 0 < recovery.recomputed_tokens < length
        assert answer(document).token_ids == first
        assert not document.verify()


def test_texts_share_up_to_a_state(model: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    with create(model, tmp_path / "d") as base:
        with create(
            model, tmp_path / "longer", text=TEXT + MORE, begins_as=base,
            on_tokens=lambda done, _: seen.append(done),
        ) as document:  # fmt: skip
            assert seen[0] == len(TEXT)
            found = answer(document).token_ids
        with create(
            model, tmp_path / "other", text=TEXT[:100] + MORE, begins_as=base,
            on_tokens=lambda done, _: seen.append(done),
        ):  # fmt: skip
            assert 0 in seen, "there is no state behind 100 tokens"
    with create(model, tmp_path / "anew", text=TEXT + MORE) as document:
        assert answer(document).token_ids == found


def test_a_chat_goes_back_to_the_end_of_a_turn(tmp_path: Path) -> None:
    """Where the history was rewritten it is read again from there on, and counted."""
    tokenizer, chatty = byte_tokenizer(), tiny_family("qwen3_next")
    chatty.resize_token_embeddings(len(tokenizer))
    loaded = LoadedModel(model=chatty, tokenizer=tokenizer, name="tiny")
    options: dict[str, Any] = {"policy": POLICY, "memory": None, "settings": SETTINGS}
    with Conversation(loaded, **options) as chat:
        chat.ask("Who ?", GREEDY)
        held = len(chat.tokens)
        turn = chat.ask("And where ?", GREEDY)
        assert turn.dropped_tokens == 0
        chat._history.messages[-1]["content"] = "Here."  # as a template that strips thoughts
        again = chat.ask("Why ?", GREEDY)
        assert again.dropped_tokens > 0
        assert chat.cache.stats.again_tokens > 0
        assert chat.counts.held_tokens == len(chat.tokens)
        assert held in chat.cache.checkpoints or 0 in chat.cache.checkpoints
        chat.save(tmp_path / "c")
        tokens = chat.tokens
        said = chat.ask("When ?", GREEDY).output.token_ids
    with Conversation.resume(loaded, tmp_path / "c", settings=SETTINGS) as chat:
        assert chat.tokens == tokens
        assert chat.ask("When ?", GREEDY).output.token_ids == said


def test_interrupted_forks_end_alone(model: Any, tmp_path: Path) -> None:
    """A cache over a document that failed goes back to the document's end."""
    with create(model, tmp_path / "d") as document, document.cache(exact=True) as cache:
        assert isinstance(cache, TieredCache)
        with torch.no_grad():
            right = model(torch.tensor([MORE]), **cache_argument(model, cache)).logits[0, -1]
            cache.crop(len(TEXT))
            handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.tensor([QUESTION]), **cache_argument(model, cache))
            handle.remove()
            cache.rewind(len(TEXT))
            found = model(torch.tensor([MORE]), **cache_argument(model, cache)).logits[0, -1]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
