"""A text read once by the plain model, and put into caches that would have read it themselves."""

import pytest
import torch
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.plain_model import tokens_of
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.testing.tiny_families import tiny_family
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from penstock.workloads.prefilled import PrefilledText

TOKENS, MORE = 90, 7


HYBRIDS = ["qwen3_next", "falcon_h1"] if HAS_RECURRENT_LAYERS else []


@pytest.fixture(scope="module", params=["qwen3", "gemma3", *HYBRIDS])
def model(request: pytest.FixtureRequest) -> CausalLM:
    """With full attention alone, with sliding windows, with recurrent states."""
    return (tiny_family if request.param in HYBRIDS else tiny_model)(request.param)


def ids(batch: int = 1, tokens: int = TOKENS + MORE) -> Tensor:
    draw = torch.Generator().manual_seed(4)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=draw)


def plain_logits(model: CausalLM, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    positions = None if mask is None else (mask.cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        logits: Tensor = model(token_ids, attention_mask=mask, position_ids=positions).logits
    return logits


@pytest.mark.parametrize("chunk", [16, 1024])
def test_what_follows_is_what_full_attention_says(model: CausalLM, chunk: int) -> None:
    token_ids = ids(batch=2)
    text = PrefilledText(model, token_ids[:, :TOKENS], chunk=chunk)
    expected = plain_logits(model, token_ids)[:, -4:]
    for _ in range(2):  # the text has not changed
        said = text.following(token_ids[:, TOKENS:], 4)
        torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
    assert text.length == TOKENS


@pytest.mark.parametrize("padding", [0, 20])
def test_a_cache_goes_on_as_if_it_had_read_the_text(model: CausalLM, padding: int) -> None:
    token_ids, mask = ids(batch=2), torch.ones(2, TOKENS + MORE, dtype=torch.int64)
    mask[1, :padding] = 0
    expected = plain_logits(model, token_ids, mask)[:, TOKENS:]
    text = PrefilledText(
        model, token_ids[:, :TOKENS], chunk=32, attention_mask=mask[:, :TOKENS]
    )  # fmt: skip
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, TOKENS:]
    for _ in range(2):  # one text for several caches
        with TieredCache(
            model, "flexgen", "1MiB", "memory", max_tokens=TOKENS + MORE, batch_size=2
        ) as cache:  # fmt: skip
            text.put_into(cache)
            assert cache.get_seq_length() == TOKENS
            with torch.no_grad():
                said = model(
                    token_ids[:, TOKENS:], attention_mask=mask, position_ids=positions,
                    **cache_argument(model, cache),
                ).logits  # fmt: skip
        torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)


def test_a_cache_without_room_refuses(model: CausalLM) -> None:
    text = PrefilledText(model, ids(tokens=TOKENS))
    with (
        TieredCache(model, "full", store="memory", max_tokens=TOKENS - 1) as cache,
        pytest.raises(CacheStateError, match="max_tokens"),
    ):
        text.put_into(cache)


def test_progress_and_the_plain_cache(model: CausalLM) -> None:
    seen: list[int] = []
    text = PrefilledText(model, ids(tokens=TOKENS), chunk=40, progress=seen.append)
    assert seen == [40, 80, TOKENS]
    assert tokens_of(text.cache, 2, text.shape)[0].shape[2] == TOKENS


def test_no_token_is_no_text(model: CausalLM) -> None:
    text = PrefilledText(model, ids(tokens=0))
    with TieredCache(model, "full", store="memory", max_tokens=8) as cache:
        text.put_into(cache)
        assert cache.get_seq_length() == 0
