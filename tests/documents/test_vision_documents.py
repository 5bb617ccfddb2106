"""Documents and chats with pictures: identity, reopening, forks, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.errors import DocumentDamagedError, DocumentMismatchError, PromptError
from penstock.documents.conversation import Conversation
from penstock.documents.document import Document
from penstock.documents.document_library import DocumentLibrary
from penstock.documents.settings import DocumentSettings
from penstock.generation.engine import LLM
from penstock.generation.prompts import visuals_in
from penstock.generation.sampling import SamplingParams
from penstock.methods import KVSwap
from penstock.models.loader import LoadedModel
from penstock.storage.documents import Damage
from penstock.testing.tiny_vision import END, IMAGE, START, VIDEO, tiny_picture, tiny_vision_model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
TWO = SamplingParams(n=2, temperature=1.0, top_k=1, max_tokens=4, ignore_eos=True)
SMALL = KVSwap(group_tokens=4, selected_tokens=16, window_tokens=8, sink_tokens=4)
ALL = KVSwap(group_tokens=4, selected_tokens=1000, window_tokens=8, sink_tokens=4)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=9)
QUESTION = " what is it?"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "llava"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_vision_model(request.param)


def mark(loaded: LoadedModel, kind: str = IMAGE) -> str:
    return f"{START}{kind}{END}" if "qwen" in loaded.name else kind


def prompt(loaded: LoadedModel, *pictures: Any, behind: str = "") -> dict[str, Any]:
    """A text with pictures, and a video behind them where the model takes any."""
    text = "".join(f"part {i} {mark(loaded)} of a text. " for i in range(len(pictures)))
    data: dict[str, Any] = {"image": list(pictures)}
    if "qwen" in loaded.name and hasattr(loaded.processor, "replace_video_token"):
        text += f"{mark(loaded, VIDEO)} end"
        data["video"] = [np.stack([tiny_picture(i) for i in range(5)])]
    return {"prompt": text + behind, "multi_modal_data": data}


def fresh(loaded: LoadedModel, given: dict[str, Any]) -> list[int]:
    """Tokens of a new cache that attends to everything."""
    [said] = LLM(loaded, memory=None).generate(given, GREEDY, use_tqdm=False)
    return said.token_ids


def test_a_reopened_document_answers_as_a_new_cache(loaded: LoadedModel, tmp_path: Path) -> None:
    picture = tiny_picture(0, 84, 112)
    path = tmp_path / "one"
    Document.create(
        loaded, prompt(loaded, picture), path, policy=ALL, memory=None, settings=SETTINGS
    ).close()
    other = prompt(loaded, tiny_picture(1, 56, 84))
    LLM(loaded, memory=None).generate(other, GREEDY, use_tqdm=False)  # another's positions
    with Document.open(loaded, path, settings=SETTINGS) as document:
        answers = document.ask([QUESTION, " and?"], GREEDY)
        twice = document.ask(QUESTION, TWO)
        seen = {"prompt": f" or {mark(loaded)}?", "multi_modal_data": {"image": picture}}
        [kept] = document.ask(seen, GREEDY, keep=True)
        again = document.ask(QUESTION, GREEDY)
    expected = [fresh(loaded, prompt(loaded, picture, behind=each)) for each in (QUESTION, " and?")]
    assert [each.token_ids for each in answers] == expected
    assert all(each.token_ids == expected[0] for each in twice[0].outputs)
    whole = prompt(loaded, picture, behind=f" or {mark(loaded)}?")
    whole["multi_modal_data"]["image"].append(picture)
    assert kept.token_ids == fresh(loaded, whole)
    assert loaded.tokenizer is not None
    said = loaded.tokenizer.decode(kept.token_ids, clean_up_tokenization_spaces=False)
    whole["prompt"] += said + QUESTION
    assert again[0].token_ids == fresh(loaded, whole)


def test_another_picture_in_the_same_place_is_another_document(tmp_path: Path) -> None:
    loaded = tiny_vision_model("llava")
    library = DocumentLibrary(tmp_path, SETTINGS)
    pictures = [tiny_picture(i) for i in range(3)]
    first = library.add(loaded, prompt(loaded, *pictures[:2]), "first", policy=SMALL)
    same = library.add(loaded, prompt(loaded, *pictures[:2], behind=" x"), "same", policy=SMALL)
    other = library.add(loaded, prompt(loaded, pictures[0], pictures[2]), "other", policy=SMALL)
    assert same.shared_tokens == len(first.document.tokens)
    begins = visuals_in(first.document.tokens)[1].start
    assert 0 < other.shared_tokens <= begins
    assert other.document.tokens == first.document.tokens
    answers = [
        added.document.ask(QUESTION, GREEDY, exact=True)[0].token_ids for added in (same, other)
    ]
    behind = f" x{QUESTION}"
    assert answers[0] == fresh(loaded, prompt(loaded, *pictures[:2], behind=behind))
    given = prompt(loaded, pictures[0], pictures[2], behind=QUESTION)
    assert answers[1] == fresh(loaded, given)
    for added in (first, same, other):
        added.document.close()


def test_damage_behind_pictures_is_mended_and_within_them_said(tmp_path: Path) -> None:
    loaded = tiny_vision_model("qwen2_5_vl")
    text = prompt(loaded, tiny_picture(0), behind=" and then a text that goes on for a while")
    with Document.create(
        loaded, text, tmp_path / "one", policy=SMALL, settings=SETTINGS
    ) as document:
        pictures = visuals_in(document.tokens)
        last = pictures[-1].end // 4 + 2
        expected = document.ask(QUESTION, GREEDY, exact=True)[0].token_ids
        lost = Damage(units={0: [last]}, blobs=[], seals=False)
        assert 0 < document.recover(lost).recomputed_tokens <= 4
        assert document.ask(QUESTION, GREEDY, exact=True)[0].token_ids == expected
        first = pictures[0].start // 4
        with pytest.raises(DocumentDamagedError, match="pixels are not stored"):
            document.recover(Damage(units={0: [first]}, blobs=[], seals=False))
    loaded.model.config.vision_start_token_id += 1
    with (
        Document.open(loaded, tmp_path / "one", settings=SETTINGS) as document,
        pytest.raises(DocumentMismatchError, match="vision is configured otherwise"),
    ):
        document.ask(QUESTION, GREEDY)


@pytest.mark.parametrize("loaded", ["qwen3_vl", "llava"], indirect=True)
def test_two_chats_with_pictures_take_turns(loaded: LoadedModel, tmp_path: Path) -> None:
    """Each turn is that of a new cache with all of the chat in one prompt, also of a chat that was
    saved and resumed."""
    chats: list[Any] = [
        Conversation(
            loaded, policy=SMALL, memory="400KiB", exact=True, max_tokens=400, settings=SETTINGS
        )
        for _ in range(2)
    ]
    messages: list[list[Any]] = [[], []]
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(tiny_picture(number, 56, 84)).save(files[-1])

    def turn(which: int, text: str, *images: Path) -> None:
        taken = chats[which].ask(text, GREEDY, images=images)
        parts = [{"type": "image", "path": each} for each in images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        messages[which].append({"role": "user", "content": content})
        [said] = LLM(loaded, memory=None).chat(messages[which], GREEDY, use_tqdm=False)
        assert taken.output.token_ids == said.token_ids
        messages[which].append({"role": "assistant", "content": taken.text})

    turn(0, "Look.", files[0])
    turn(1, "See these.", files[1], files[2])
    turn(0, "And this.", files[1])
    turn(1, "Well?")
    assert chats[1].counts.dropped_tokens == 0
    chats[0].save(tmp_path / "saved")
    chats[0].close()
    chats[0] = Conversation.resume(
        loaded, tmp_path / "saved", exact=True, max_tokens=400, settings=SETTINGS
    )
    turn(0, "Go on.", files[2])
    assert chats[0].counts.restored_tokens > 0
    assert chats[0].counts.dropped_tokens == 0
    with pytest.raises(PromptError, match="cannot read the picture"):
        chats[0].ask("What?", images=[tmp_path / "none.png"])
    for chat in chats:
        chat.close()
