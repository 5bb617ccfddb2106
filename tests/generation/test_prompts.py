"""Prompts are checked before anything runs, and padded on the left."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import PromptError
from penstock.generation.prompts import as_prompt_list, make_batch, read_text_file
from penstock.models.loader import LoadedModel, load


@pytest.fixture(scope="module")
def recall() -> LoadedModel:
    return load("recall")


def make(recall: LoadedModel, *prompts: Any, new_tokens: int = 1) -> Any:
    return make_batch(recall, list(prompts), new_tokens=new_tokens, pad_token_id=0)


def test_padding_is_on_the_left(recall: LoadedModel) -> None:
    batch = make(recall, "The grass is green .", [5, 6], "The sky")
    assert batch.token_ids[1] == [5, 6]
    assert batch.texts == ["The grass is green .", None, "The sky"]
    assert batch.attention_mask.tolist() == [[1] * 6, [0] * 4 + [1] * 2, [0] * 3 + [1] * 3]
    assert batch.input_ids[1].tolist() == [0, 0, 0, 0, 5, 6]
    assert batch.padded_tokens == 6


@pytest.mark.parametrize("prompt", ["", "  \n", []])
def test_zero_tokens(recall: LoadedModel, prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"prompt 1 is empty: it has zero tokens"):
        make(recall, "The", prompt)


def test_no_prompt_at_all() -> None:
    with pytest.raises(PromptError, match="zero tokens"):
        as_prompt_list([])


def test_the_positions_hold_prompt_and_answer(recall: LoadedModel) -> None:
    make(recall, [7] * 40_000, new_tokens=960)
    with pytest.raises(PromptError, match=r"40,000 tokens and 961 more .* 40,960 positions"):
        make(recall, [7] * 40_000, new_tokens=961)


@pytest.mark.parametrize("token", [-1, 1472])
def test_a_token_id_that_the_model_does_not_have(recall: LoadedModel, token: int) -> None:
    with pytest.raises(PromptError, match=f"token id {token}"):
        make(recall, [5, token])


def test_text_needs_a_tokenizer(recall: LoadedModel) -> None:
    bare = LoadedModel(model=recall.model, tokenizer=None, name="bare")
    assert make_batch(bare, [[5]], new_tokens=1, pad_token_id=0).padded_tokens == 1
    with pytest.raises(PromptError, match="bare came without a tokenizer"):
        make_batch(bare, ["The"], new_tokens=1, pad_token_id=0)


def test_one_prompt_or_several() -> None:
    assert as_prompt_list("a") == ["a"]
    assert as_prompt_list([1, 2]) == [[1, 2]]
    several: list[str | list[int]] = ["a", [1]]
    assert as_prompt_list(several) == several


def test_reading_a_file(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("naïve", encoding="utf-8")
    assert read_text_file(good) == "naïve"
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(PromptError, match=r"prompt file .*latin is not UTF-8"):
        read_text_file(tmp_path / "latin")
    with pytest.raises(PromptError, match=r"cannot read letter .*none: No such file"):
        read_text_file(tmp_path / "none", "letter")
    with pytest.raises(PromptError, match="Is a directory"):
        read_text_file(tmp_path)


def test_halves_of_characters_are_no_text(recall: LoadedModel) -> None:
    with pytest.raises(PromptError, match="the prompt is not UTF-8 text"):
        make(recall, "The \udcff sky")
