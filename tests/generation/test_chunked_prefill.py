"""Chunks that are read before `generate`: what one forward pass over the whole prompt gives."""

from collections.abc import Sequence

import pytest
import torch

from penstock import LLM, SamplingParams, TieredCache
from penstock.generation.chunked_prefill import read_ahead
from penstock.generation.prompts import make_batch
from penstock.models.loader import LoadedModel
from penstock.testing.tiny_models import VOCABULARY, tiny_model

LENGTHS = (61, 9, 40)
"""The second row is padding for more than its first chunks."""


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama", (2, 59)), ("gemma2", (7, 30, 60)), ("gpt_neox", (30, 59)), ("opt", (7, 60))],
)
def test_chunks_change_no_answer(family: str, sizes: tuple[int, ...]) -> None:
    """Rows of one batch, two of them padded; chunks that leave one token over, and two."""
    told, model = {}, tiny_model(family)
    for size in (1000, *sizes):
        llm = LLM(model, policy="full", store="memory", prefill_chunk_size=size)
        outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=3))
        told[size] = [output.token_ids for output in outputs]
        assert told[size] == told[1000], size
    assert len(set(map(tuple, told[1000]))) == len(LENGTHS)


@pytest.mark.parametrize("chunk", [2, 7, 20, 59, 60])
def test_a_chunk_is_left_or_a_chunk_and_a_token(chunk: int) -> None:
    model = tiny_model("llama")
    loaded = LoadedModel(model=model, tokenizer=None, name="tiny")
    batch = make_batch(loaded, prompts(), new_tokens=1, pad_token_id=0)
    with TieredCache(model, "full", store="memory", max_tokens=70, batch_size=3) as cache:
        read_ahead(model, cache, batch, chunk)
        held = cache.get_seq_length()
        assert 1 <= 61 - held <= chunk + 1
        assert held % chunk == 0
        read_ahead(model, cache, batch, chunk)
        assert cache.get_seq_length() == held
