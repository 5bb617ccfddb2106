"""Blocks of one softmax merge to the whole, in any order; a sink only takes weight away."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from penstock.kernels.plain_attention import add_attention_sink, attention_twin
from penstock.kernels.prompt_attention import merge_into

CUTS = ((0, 9), (9, 10), (10, 30))


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, 5, 8) * 3, torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)


def blocks(qkv: tuple[Tensor, Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    query, keys, values = qkv
    return [attention_twin(query, keys[:, :, a:b], values[:, :, a:b], scaling=0.5) for a, b in CUTS]


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge_into` of copies, in the layout of a block."""
    so_far = out_a.transpose(1, 2).clone(memory_format=torch.contiguous_format), lse_a
    out, lse = merge_into(so_far, out_b, lse_b)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_gives_the_whole(
    order: tuple[int, ...], qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    a, b, c = (blocks(qkv)[i] for i in order)
    whole = attention_twin(*qkv, scaling=0.5)
    left = merge_attention(*merge_attention(*a, *b), *c)
    right = merge_attention(*a, *merge_attention(*b, *c))
    for merged in (left, right):
        assert torch.allclose(merged[0], whole[0], atol=1e-6)
        assert torch.allclose(merged[1], whole[1], atol=1e-6)


def test_an_empty_block_adds_nothing(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse = blocks(qkv)[0]
    empty = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (merge_attention(out, lse, *empty), merge_attention(*empty, out, lse)):
        assert torch.allclose(merged[0], out, atol=1e-7)
        assert torch.equal(merged[1], lse)
    nothing, nowhere = merge_attention(*empty, *empty)
    assert (nothing == 0).all()
    assert (nowhere == -math.inf).all()


def test_large_logits_do_not_overflow(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, keys, values = qkv
    parts = [
        attention_twin(query * 100, keys[:, :, a:b], values[:, :, a:b], scaling=5.0)
        for a, b in CUTS[:2]
    ]
    whole = attention_twin(query * 100, keys[:, :, :10], values[:, :, :10], scaling=5.0)
    assert torch.allclose(merge_attention(*parts[0], *parts[1])[0], whole[0], atol=1e-5)


def test_a_sink_is_a_key_without_a_value(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    query, keys, values = qkv
    sinks = torch.tensor([-2.0, 0.0, 1.5, 30.0])
    out, lse = add_attention_sink(*attention_twin(query, keys, values, scaling=0.5), sinks)
    logits = (query @ keys.repeat_interleave(2, dim=1).transpose(-1, -2)) * 0.5
    with_sink = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], dim=-1)
    weights = with_sink.softmax(-1)[..., :-1]
    assert torch.allclose(out, weights @ values.repeat_interleave(2, dim=1), atol=1e-6)
    assert torch.allclose(lse, with_sink.logsumexp(-1), atol=1e-6)
