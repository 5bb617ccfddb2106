"""An identity says what KV depends on, and nothing that a call or a setting leaves behind."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.models.identity import ModelIdentity
from penstock.models.loader import LoadedModel, load
from penstock.testing.tiny_models import tiny_model


def digest(value: object) -> str:
    plain = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("recall")


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> ModelIdentity:
    return ModelIdentity.of(loaded.model, loaded.tokenizer)


def test_a_tokenizer_without_them_is_what_it_was(loaded: LoadedModel, plain: ModelIdentity) -> None:
    """Documents of former versions open: whoever changes this digest gives them up."""
    tokenizer: Any = loaded.tokenizer
    said = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    assert plain.tokenizer == digest(said)


def _truncate(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(7)


def _pad(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_padding(length=9)


def _call(tokenizer: Any) -> None:
    tokenizer(["The grass is", "blue"], padding=True, truncation=True, max_length=2)


@pytest.mark.parametrize("leave", [_truncate, _pad, _call])
def test_truncation_and_padding_are_no_part_of_a_tokenizer(
    leave: Callable[[Any], None], loaded: LoadedModel, plain: ModelIdentity
) -> None:
    tokenizer: Any = loaded.tokenizer
    backend = tokenizer.backend_tokenizer
    leave(tokenizer)
    left = (backend.truncation, backend.padding)
    assert left != (None, None)
    try:
        assert ModelIdentity.of(loaded.model, loaded.tokenizer) == plain
        assert (backend.truncation, backend.padding) == left, "the tokenizer is as it was"
    finally:
        backend.no_truncation()
        backend.no_padding()


def test_a_folder_whose_tokenizer_truncates(
    loaded: LoadedModel, plain: ModelIdentity, tmp_path: Path
) -> None:
    tokenizer: Any = loaded.tokenizer
    tokenizer.save_pretrained(tmp_path)
    tokenizer.backend_tokenizer.enable_truncation(512)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.backend_tokenizer.no_truncation()
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again.backend_tokenizer.truncation is not None
    before = ModelIdentity.of(loaded.model, again)
    again("The grass is")
    assert before == ModelIdentity.of(loaded.model, again) == plain


def test_how_a_model_is_run_is_no_part_of_it(tmp_path: Path) -> None:
    made: Any = tiny_model("llama")
    made.config.pad_token_id = 2
    made.save_pretrained(tmp_path)
    model: Any = type(made).from_pretrained(tmp_path)
    plain = ModelIdentity.of(model, None)
    as_it_was = ModelIdentity.of(made, None)
    assert plain == as_it_was, "what is not changed is digested as it is"
    model.config.use_cache = False
    model.config.pad_token_id = 3
    assert ModelIdentity.of(model, None) == plain
    assert (model.config.use_cache, model.config.pad_token_id) == (False, 3)
    model.config.rms_norm_eps = 1e-3
    assert ModelIdentity.of(model, None).configuration != plain.configuration


def test_a_model_whose_folder_has_gone(tmp_path: Path) -> None:
    made: Any = tiny_model("llama")
    made.save_pretrained(tmp_path / "there")
    model = type(made).from_pretrained(tmp_path / "there")
    there = ModelIdentity.of(model, None)
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    assert ModelIdentity.of(model, None) == there
