"""Prompts are checked before anything runs, and padded on the left."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from penstock.core.errors import PromptError
from penstock.generation.prompts import as_prompt_list, make_batch, read_text_file, single_prompt
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


def test_whole_numbers_of_arrays_are_token_ids(recall: LoadedModel) -> None:
    for given in (np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)]):
        prompts: Any = given
        assert make(recall, *as_prompt_list(prompts)).token_ids == [[1, 2]]
    rows: Any = torch.tensor([[1, 2], [3, 4]])
    assert make(recall, *as_prompt_list(rows)).token_ids == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "given",
    [
        [{"prompt": "The grass"}, {"prompt_token_ids": [5, 6]}, "The sky", torch.tensor([7])],
        ["The grass", {"prompt": None, "prompt_token_ids": [5, 6]}, {"prompt": "The sky"}, [7]],
        ["The grass", torch.tensor([5, 6]), "The sky", {"input_ids": torch.tensor([[7]])}],
        ["The grass", {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}, "The sky", (7,)],
    ],
    ids=["dicts", "mixed", "tensors", "encoding"],
)
def test_prompts_of_every_kind_beside_each_other(recall: LoadedModel, given: Any) -> None:
    batch = make(recall, *as_prompt_list(given))
    assert batch.texts == ["The grass", None, "The sky", None]
    assert batch.token_ids[1::2] == [[5, 6], [7]]


def test_token_ids_keep_the_text_that_they_came_with(recall: LoadedModel) -> None:
    given: Any = {"prompt": "The grass", "prompt_token_ids": [5, 6], "multi_modal_data": None}
    batch = make(recall, *as_prompt_list(given))
    assert (batch.texts, batch.token_ids) == (["The grass"], [[5, 6]])


@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_what_a_tokenizer_makes_of_texts(recall: LoadedModel, tensors: str | None) -> None:
    tokenizer: Any = recall.tokenizer
    texts = ["The grass is green .", "The sky"]
    plain = [tokenizer(text)["input_ids"] for text in texts]
    options = {} if tensors is None else {"return_tensors": tensors, "padding": True}
    assert make(recall, *as_prompt_list(tokenizer(texts, **options))).token_ids == plain
    one = tokenizer(texts[0], **options)
    assert make(recall, *as_prompt_list(one)).token_ids == plain[:1]
    both = make(recall, *as_prompt_list([one, tokenizer(texts[1])]))
    assert both.token_ids == plain


def test_one_prompt_is_not_several() -> None:
    assert single_prompt({"prompt": "a"}) == "a"
    with pytest.raises(PromptError, match="there are 2 prompts; give one"):
        single_prompt({"input_ids": [[1], [2]]})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": "The grass"}, "a dict with text is no prompt"),  # its keys would be the prompts
        ({}, "an empty dict is no prompt"),
        ([{"prompt": "a", "ids": [1]}], "a dict with ids is no prompt"),
        ({"prompt": 5}, "prompt is a int"),
        ({"prompt": None}, "prompt and prompt_token_ids of a dict are None"),
        ({"prompt_token_ids": ["a"]}, "prompt_token_ids holds a str"),
        ({"prompt": "a", "multi_modal_data": {"sound": 1}}, "and nothing else"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "different lengths"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]}, "different lengths"),
        (BatchEncoding({"input_ids": "text"}), "holds a str"),
        (["The grass", 5], "beside other prompts"),  # the 5 would be left out
        ([5, "The grass"], "beside other prompts"),
        (b"The grass", "not bytes"),  # they would be token ids
        ([b"The grass"], "not bytes"),
        ([[1.5, 2.0]], "holds a float"),  # they would be 1 and 2
        ([[1, None]], "holds a NoneType"),
        ([1.5], "not float"),
        ([["The", "grass"]], "holds a str"),
        (None, "not NoneType"),
        (5, "not int"),
        (torch.tensor(5), "not Tensor"),
    ],
)
def test_what_is_no_prompt(recall: LoadedModel, given: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        make(recall, *as_prompt_list(given))


def test_reading_a_file(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("naïve", encoding="utf-8")
    assert read_text_file(good) == "naïve"
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(PromptError, match=r"prompt file .*latin is not UTF-8"):
        read_text_file(tmp_path / "latin")
    with pytest.raises(PromptError, match=r"cannot read letter .*none: No such file"):
        read_text_file(tmp_path / "none", "letter")
    with pytest.raises(PromptError, match="it is a folder, not a file"):
        read_text_file(tmp_path)


def test_halves_of_characters_are_no_text(recall: LoadedModel) -> None:
    with pytest.raises(PromptError, match="the prompt is not UTF-8 text"):
        make(recall, "The \udcff sky")
