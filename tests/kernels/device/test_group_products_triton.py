"""Products of key codes in Triton are those of the plain twin, at every width of a code."""

from typing import Any

import pytest
import torch

from penstock.kernels.group_products import group_products_twin


@pytest.mark.parametrize(("bits", "rank"), [(16, 16), (16, 40), (8, 24), (8, 64), (4, 32), (4, 21)])
@pytest.mark.parametrize(("batch", "blocks", "group", "heads"), [(1, 1, 4, 4), (2, 3, 1, 16)])
def test_codes_of_every_width(
    device: torch.device, triton: Any, bits: int, rank: int, batch: int, blocks: int, group: int,
    heads: int,
) -> None:  # fmt: skip
    from penstock.kernels.group_products_triton import group_products

    torch.manual_seed(rank + blocks)
    width = (rank + 1) // 2 if bits == 4 else rank
    size = (batch, blocks + 1, group, 256, width)
    if bits == 16:
        codes = torch.randn(size).to(torch.bfloat16)
    else:
        low, high, kind = (-127, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
        codes = torch.randint(low, high, size, dtype=torch.int16).to(kind)
    codes = codes.to(device)[:, :blocks]  # rows are farther apart than blocks are long
    queries = torch.randn(batch, heads, rank, device=device)
    if bits == 16:
        queries = queries.to(torch.bfloat16).float()  # the twin multiplies in the codes' dtype
    actual = group_products(codes, queries, bits)
    expected = group_products_twin(codes, queries, bits)
    assert actual.shape == (batch, blocks * 256, heads)
    scale = expected.abs().max()
    tolerance = 1e-2 if bits == 16 else 1e-5
    assert ((actual - expected).abs().max() / scale).item() < tolerance
    assert not torch.allclose(actual, actual[:, :1].expand_as(actual))
