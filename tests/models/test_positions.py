"""Prompts that LLM reads have the positions that `generate` gives them."""

from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams, TieredCache
from penstock.models.cache_argument import position_argument
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.testing.tiny_families import VOCABULARY, tiny_family


def test_only_models_that_take_positions_get_them() -> None:
    given = []
    for model in (tiny_family("llama"), tiny_family("bart")):
        with TieredCache(model, "full", store="memory", max_tokens=64) as cache:
            given.append(position_argument(model, cache, 3, 6, rows=2))
    assert given[0]["position_ids"].tolist() == [[3, 4, 5]] * 2
    assert given[1] == {}


@pytest.mark.skipif(
    not HAS_RECURRENT_LAYERS, reason="this transformers has other states and masks for these two"
)
@pytest.mark.parametrize("family", ["camembert", "bamba"])
def test_models_with_positions_of_their_own(family: str) -> None:
    """RoBERTa's count from the padding token without them, Bamba's by its first layer."""
    model: Any = tiny_family(family)
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    llm = LLM(model, policy="full", store="memory", prefill_chunk_size=16)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [answer] = llm.generate([ids[0].tolist()], params)
    assert answer.outputs[0].token_ids == expected[0, 40:].tolist()
