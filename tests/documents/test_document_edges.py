"""What is said of an answer's run, and texts that share almost nothing."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from penstock import KVSwap, SamplingParams
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.testing.tiny_models import tiny_model

SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)
POLICY = KVSwap(group_tokens=8, window_tokens=16, selected_tokens=48)
TEXT = [5 + i % 90 for i in range(100)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def create(model: PreTrainedModel, path: Path, text: list[int], base: Document | None) -> Document:
    return Document.create(
        model, text, path, policy=POLICY, memory=None, settings=SETTINGS, begins_as=base
    )


def test_a_run_says_whether_it_was_exact(model: PreTrainedModel, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    with create(model, tmp_path / "d", TEXT, None) as document:
        for exact in (True, False):
            [output] = document.ask([7, 8], params, exact=exact)
            assert output.run.exact is exact


@pytest.mark.parametrize("text", [[9], [5], [5, 9], [9, 5]])
def test_texts_of_one_token_or_two_behind_a_base(
    text: list[int], model: PreTrainedModel, tmp_path: Path
) -> None:
    with (
        create(model, tmp_path / "base", TEXT, None) as base,
        create(model, tmp_path / "alone", text, None) as alone,
        create(model, tmp_path / "d", text, base) as document,
    ):
        assert document.tokens == text
        with document.cache(new_tokens=1) as cache, alone.cache(new_tokens=1) as other:
            for layer in range(2):
                mine, its = (
                    each._runtime.read_tokens(layer, 0, len(text)) for each in (cache, other)
                )
                assert torch.allclose(mine, its, atol=1e-5)
