"""code_products(): the integer way means what plain torch means."""

import pytest
import torch

from penstock.kernels.code_products import code_products, code_products_reference


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rank", [7, 8, 48])
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_equal_the_reference(bits: int, rank: int, batch: int, heads: int) -> None:
    torch.manual_seed(rank)
    width = rank if bits == 8 else (rank + 1) // 2
    if bits == 8:
        codes = torch.randint(-127, 128, (batch, 64, width), dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (batch, 64, width), dtype=torch.uint8)
    queries = torch.randn(batch, heads, rank)
    fast = code_products(codes, queries, bits)
    slow = code_products_reference(codes, queries, bits)
    assert fast.shape == (batch, 64, heads)
    assert fast.dtype == torch.float32
    # The query is rounded to 1/127 of its largest component.
    bound = queries.abs().amax(-1) / 254 * rank * (127 if bits == 8 else 7.5)
    assert ((fast - slow).abs() <= bound[:, None] + 1e-3).all()
    error = (fast - slow).square().mean().sqrt() / slow.square().mean().sqrt()
    assert error < 0.02


def test_nibbles() -> None:
    """Low nibbles are the first half of the components; a code stands for nibble - 7.5."""
    codes = torch.tensor([[[0x3 | 0xF << 4, 0x0 | 0x8 << 4]]], dtype=torch.uint8)
    unit = torch.eye(3).unsqueeze(0)
    expected = [-4.5, -7.5, 7.5]
    assert code_products_reference(codes, unit, 4)[0, 0].tolist() == expected
    assert code_products(codes, unit, 4)[0, 0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_are_a_plain_product(dtype: torch.dtype) -> None:
    codes, queries = torch.randn(2, 9, 5).to(dtype), torch.randn(2, 3, 5)
    expected = codes.float() @ queries.transpose(1, 2)
    assert torch.allclose(code_products(codes, queries, 16), expected, atol=0.1, rtol=0.02)


def test_a_query_of_zeros() -> None:
    codes = torch.randint(-127, 128, (1, 32, 8), dtype=torch.int8)
    assert (code_products(codes, torch.zeros(1, 2, 8), 8) == 0).all()
