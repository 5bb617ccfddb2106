"""An index whose keys are turned by blocks, in Triton: queries of all blocks, products, a unit."""

from typing import Any

import pytest
import torch

from penstock.core.shape import KVShape
from penstock.kernels.group_products import group_products_twin
from penstock.kernels.key_rotation import KeyRotation
from penstock.methods.kvswap.index import LowRankIndex

HEADS, KV_HEADS, DIM = 6, 2, 32


def rotation_of(pairs: int, interleaved: bool) -> KeyRotation:
    return KeyRotation(torch.rand(pairs, dtype=torch.float64), interleaved)


@pytest.mark.parametrize(
    ("pairs", "interleaved", "dtype", "rank"),
    [
        (16, False, torch.float32, 20), (16, True, torch.bfloat16, 33),
        (12, False, torch.bfloat16, 16), (5, True, torch.float32, 64),
    ],
)  # fmt: skip
def test_queries_of_all_blocks(
    device: torch.device, triton: Any, pairs: int, interleaved: bool, dtype: torch.dtype, rank: int
) -> None:
    from penstock.kernels.device.block_queries_triton import block_queries_triton

    rotation = rotation_of(pairs, interleaved)
    table = rotation.turns(64, 19, device).table
    row_turn = rotation.turns(7, 3, device).table[1:]
    query = torch.randn(2, HEADS, DIM, device=device, dtype=dtype)
    basis = torch.linalg.qr(torch.randn(KV_HEADS * DIM, KV_HEADS * DIM)).Q[:, :rank]
    basis, factor = basis.contiguous().to(device, dtype), torch.rand(rank, device=device)
    host = rotation.turns(64, 19, torch.device("cpu"))
    expected = host.queries(
        query.cpu(), basis.cpu(), KV_HEADS, factor.cpu(), 2, 19, row_turn.cpu()
    )  # fmt: skip
    given = (query, basis, factor, table[2:19], row_turn)
    found = block_queries_triton(*given, interleaved=interleaved, dtype=torch.float32)
    assert found.shape == (2, 17, HEADS, rank)
    worst = float((found.cpu() - expected).abs().max() / expected.abs().max())
    assert worst < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not torch.allclose(found[:, 0], found[:, 5], rtol=0.1, atol=0.1), "blocks differ"
    rounded = block_queries_triton(*given, interleaved=interleaved, dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.float(), found, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("bits", "rank", "group", "heads", "parts"),
    [(4, 21, 3, 5, 16), (8, 24, 2, 3, 16), (16, 16, 4, 4, 8), (4, 32, 1, 32, 1)],
)
def test_products_with_each_parts_queries(
    device: torch.device, triton: Any, bits: int, rank: int, group: int, heads: int, parts: int
) -> None:
    from penstock.kernels.group_products_triton import group_products

    batch, blocks = 2, 2 if bits == 16 else 1
    width = (rank + 1) // 2 if bits == 4 else rank
    size = (batch, blocks + 1, group, 256, width)
    if bits == 16:
        codes = torch.randn(size).to(torch.bfloat16)
    else:
        low, high, kind = (-127, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
        codes = torch.randint(low, high, size, dtype=torch.int16).to(kind)
    codes = codes.to(device)[:, :blocks]  # rows are farther apart than blocks are long
    queries = torch.randn(batch, blocks * parts, heads, rank, device=device)
    if bits == 16:
        queries = queries.to(torch.bfloat16).float()  # the twin multiplies in the codes' dtype
    expected = group_products_twin(codes.contiguous(), queries, bits)
    found = group_products(codes, queries, bits)
    assert found.shape == (batch, blocks * 256, heads)
    scale = expected.abs().max()
    assert float((found - expected).abs().max() / scale) < (1e-2 if bits == 16 else 1e-5)
    if bits != 16:
        rounded = group_products(codes, queries.to(torch.bfloat16), bits)
        assert float((rounded - expected).abs().max() / scale) < 1e-2


@pytest.mark.parametrize(
    ("pairs", "interleaved", "rank", "bits", "group"),
    [
        (16, False, 31, 4, 1), (12, True, 20, 4, 2), (16, False, 20, 8, 3), (0, False, 21, 4, 2),
        (5, True, 18, 16, 2),
    ],
)  # fmt: skip
def test_a_unit_that_only_the_device_knows(
    device: torch.device, triton: Any, pairs: int, interleaved: bool, rank: int, bits: int,
    group: int,
) -> None:  # fmt: skip
    from penstock.kernels.device.put_codes_triton import put_codes_triton

    shape = KVShape(
        num_layers=1, num_query_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        dtype=torch.float32,
    )  # fmt: skip
    rotation = rotation_of(pairs, interleaved) if pairs else None
    index = LowRankIndex(
        shape, batch=2, max_units=600, group_tokens=group, rank=rank, bits=bits,
        head_reduction="softmax", scaling=0.3, adapter=None, device=torch.device("cpu"),
        rotation=rotation,
    )  # fmt: skip
    keys = torch.randn(2, 600 * group, KV_HEADS, DIM)
    index.see_queries(torch.randn(2, HEADS, 8, DIM) * torch.arange(1, DIM + 1))
    index.fit(keys, torch.arange(600 * group))
    turn = None
    if rotation is not None:
        index.see_start(torch.tensor([0, 3]).numpy())
        assert index._turns is not None
        assert index._row_turn is not None
        table = index._turns.table.to(device)
        per_turn = index._turns.block_tokens // group
        turn = (table, index._row_turn.to(device), per_turn, interleaved)
    on_device = torch.zeros_like(index._codes, device=device)
    for number in (255, 577):
        unit = torch.tensor([number])
        some = keys[:, number * group : (number + 1) * group]
        index.put(some, unit)
        put_codes_triton(
            some.to(device), unit.to(device), on_device, index._encoder.to(device),
            index._per_step.to(device), bits=bits, fine=index._fine, turn=turn,
        )  # fmt: skip
    assert bool((index._fine > 0) == (bits == 4 and pairs > 0))
    found, expected = on_device.cpu(), index._codes
    assert bool(expected[:, 2, :, 577 - 512].ne(0).any())
    if bits == 16:
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-3)
    else:  # sums are added in another order: a code may lie one level beside
        assert float((found != expected).float().mean()) < 1e-4
