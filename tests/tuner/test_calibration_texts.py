"""Texts to tune on: files cut into pieces, and the documents that come with the bundled model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError, PromptError
from penstock.models.loader import LoadedModel, load
from penstock.models.plain_model import random_model
from penstock.tuner.calibration_texts import SHORTEST_PROMPT_TOKENS, calibration_tokens

FORCED = 64


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("recall")


@pytest.mark.parametrize(("tokens", "longest", "count"), [(1024, 1024, 4), (9000, 8192, 4)])
def test_shipped_documents_are_the_longest_that_fit(
    loaded: LoadedModel, tokens: int, longest: int, count: int
) -> None:
    texts = calibration_tokens(loaded, [], tokens=tokens, forced=FORCED)
    assert [0.9 * longest < len(text) <= longest for text in texts] == [True] * count
    assert loaded.tokenizer is not None
    for text in texts:
        assert text.dtype == torch.int64
        assert text[0] == loaded.tokenizer.bos_token_id
        assert int((text == loaded.tokenizer.unk_token_id).sum()) == 0
    said = [loaded.tokenizer.decode(text) for text in texts]
    assert all("Question :" in each and "Answer :" in each[-1500:] for each in said)


def test_full_attention_knows_the_shipped_answers(loaded: LoadedModel) -> None:
    texts = calibration_tokens(loaded, [], tokens=1024, forced=24)
    right = []
    for text in texts:
        with torch.no_grad():
            said = loaded.model(text[None]).logits[0, -25:-1].argmax(dim=-1)
        right.append(float((said == text[-24:]).float().mean()))
    assert sum(right) / len(right) > 0.9


def test_what_is_shipped_is_for_one_model(loaded: LoadedModel) -> None:
    other = LoadedModel(
        model=random_model("tiny", max_positions=4096), tokenizer=loaded.tokenizer, name="mine"
    )
    with pytest.raises(ConfigError, match=r"mine on .*--text FILE"):
        calibration_tokens(other, [], tokens=1024, forced=FORCED)


def test_files_are_cut_into_pieces(loaded: LoadedModel, tmp_path: Path) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("The grass is green . " * 240)  # 1,200 tokens
    short.write_text("The sky is blue . " * 80)  # 400
    texts = calibration_tokens(loaded, [long, short], tokens=500, forced=FORCED)
    # What is left of the first file is too short beside its other pieces.
    assert [len(text) for text in texts] == [500, 500, 401]
    assert loaded.tokenizer is not None
    assert all(text[0] == loaded.tokenizer.bos_token_id for text in texts)
    body = torch.cat([text[1:] for text in texts[:2]])
    assert body.tolist() == loaded.tokenizer(long.read_text())["input_ids"][1 : 1 + len(body)]


def test_a_long_enough_rest_is_a_piece(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The grass is green . " * 170)  # 850 tokens
    texts = calibration_tokens(loaded, [file], tokens=500, forced=FORCED)
    assert [len(text) for text in texts] == [500, 352]


def test_bad_texts(loaded: LoadedModel, tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("The sky is blue . " * 20)
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match=r"has 101 tokens.*at least 320, and better of 1,024"):
        calibration_tokens(loaded, [short], tokens=1024, forced=FORCED)
    with pytest.raises(PromptError, match="not UTF-8"):
        calibration_tokens(loaded, [binary], tokens=1024, forced=FORCED)
    with pytest.raises(PromptError, match="cannot read"):
        calibration_tokens(loaded, [tmp_path / "none.txt"], tokens=1024, forced=FORCED)
    with pytest.raises(PromptError, match="--text FILE"):
        calibration_tokens(loaded, [], tokens=600, forced=FORCED)
    with pytest.raises(ConfigError, match="too short to tune on"):
        calibration_tokens(loaded, [], tokens=SHORTEST_PROMPT_TOKENS, forced=FORCED)
    with pytest.raises(ConfigError, match="without a tokenizer"):
        calibration_tokens(replace(loaded, tokenizer=None), [], tokens=1024, forced=FORCED)
