"""KeyTurns: keys turned back by blocks, and queries turned as far, have their old products."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.key_rotation import KeyRotation

HEAD_DIM, KV_HEADS, HEADS, BLOCK, TOKENS = 16, 2, 6, 8, 50
KINDS = [(8, False), (8, True), (5, False), (5, True)]
"""Pairs of a head, of which five leave components that do not turn; and how pairs lie."""


@pytest.fixture(params=KINDS, ids=str)
def rotation(request: pytest.FixtureRequest) -> KeyRotation:
    pairs, interleaved = request.param
    return KeyRotation(100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs), interleaved)


@pytest.fixture
def before() -> Tensor:
    """Keys before the rotary embedding. [1, tokens, kv_heads, head_dim]"""
    return torch.randn(1, TOKENS, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


def at(positions: Tensor) -> Tensor:
    return positions[None, :, None]


def test_a_pair_turns_by_its_frequency() -> None:
    rotation = KeyRotation(torch.tensor([0.5], dtype=torch.float64))
    turned = rotation.turned(torch.tensor([1.0, 0.0, 7.0]), torch.tensor(3))
    angle = torch.tensor(1.5)
    torch.testing.assert_close(turned, torch.tensor([angle.cos(), angle.sin(), 7.0]))


def test_keys_lose_the_start_of_their_block(rotation: KeyRotation, before: Tensor) -> None:
    places = torch.arange(TOKENS)
    keys = rotation.turned(before, at(places))
    turns = rotation.turns(BLOCK, 7, keys.device)
    expected = rotation.turned(before, at(places % BLOCK))
    torch.testing.assert_close(turns.keys(keys, 0), expected)
    torch.testing.assert_close(turns.keys(keys[:, 19:30], 19), expected[:, 19:30])
    some = torch.tensor([3, 40, 9])
    torch.testing.assert_close(turns.keys(keys[:, some], some), expected[:, some])
    torch.testing.assert_close(turns.keys_of(expected), keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_stay(rotation: KeyRotation, before: Tensor, dtype: torch.dtype) -> None:
    """With all components, the products of low-rank queries and keys are those of the vectors."""
    torch.manual_seed(0)
    keys = rotation.turned(before, at(torch.arange(TOKENS)))
    query = torch.randn(1, HEADS, HEAD_DIM).to(dtype)
    basis = torch.linalg.qr(torch.randn(KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))[0].to(dtype)
    turns = rotation.turns(BLOCK, 7, keys.device)
    factor = torch.rand(KV_HEADS * HEAD_DIM) + 0.5
    parts = [turns.queries(query, basis, KV_HEADS, factor, *part) for part in ((0, 3), (3, 7))]
    queries = torch.cat(parts, dim=1) / factor
    components = turns.keys(keys, 0).flatten(2) @ basis.float()
    of_token = queries.repeat_interleave(BLOCK, dim=1)[:, :TOKENS]
    found = torch.einsum("bnhr,bnr->bhn", of_token, components)
    whole = keys.repeat_interleave(HEADS // KV_HEADS, dim=2)
    expected = torch.einsum("bhd,bnhd->bhn", query.float(), whole)
    precise = dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3 if precise else 0.3)


def test_layers_share_a_table(rotation: KeyRotation) -> None:
    cpu = torch.device("cpu")
    assert rotation.turns(BLOCK, 7, cpu) is rotation.turns(BLOCK, 7, cpu)
    assert rotation.turns(BLOCK, 7, cpu) is not rotation.turns(BLOCK, 8, cpu)
