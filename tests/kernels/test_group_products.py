"""group_products(): the integer way means what plain torch means."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.group_products import group_products, group_products_twin
from penstock.testing.pairs import covering

BLOCKS, GROUP, GROUPS = 2, 4, 8


def random_codes(batch: int, rank: int, bits: int) -> Tensor:
    size = (batch, BLOCKS, GROUP, GROUPS, rank if bits == 8 else (rank + 1) // 2)
    if bits == 8:
        return torch.randint(-127, 128, size, dtype=torch.int8)
    return torch.randint(0, 256, size, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("bits", "rank", "batch", "heads"), covering([8, 4], [7, 8, 48], [1, 2], [1, 3, 8])
)
def test_integers_equal_the_twin(bits: int, rank: int, batch: int, heads: int) -> None:
    torch.manual_seed(rank)
    codes, queries = random_codes(batch, rank, bits), torch.randn(batch, heads, rank)
    before = codes.clone()
    fast = group_products(codes, queries, bits)
    slow = group_products_twin(codes, queries, bits)
    assert fast.shape == slow.shape == (batch, BLOCKS * GROUPS, heads)
    assert fast.dtype == torch.float32
    assert torch.equal(codes, before), "codes are kept for the next step"
    # The query is rounded to 1/127 of its largest component.
    bound = queries.abs().amax(-1) / 254 * rank * (127 if bits == 8 else 7.5)
    assert ((fast - slow).abs() <= bound[:, None] + 1e-3).all()
    assert (fast - slow).square().mean().sqrt() < 0.03 * slow.square().mean().sqrt()


def test_nibbles() -> None:
    """Low nibbles are the first half of the components; a code stands for nibble - 7.5."""
    codes = torch.tensor([0x3 | 0xF << 4, 0x0 | 0x8 << 4], dtype=torch.uint8)
    codes, unit = codes.expand(1, 1, 1, GROUPS, 2), torch.eye(3).unsqueeze(0)
    expected = [-4.5, -7.5, 7.5]
    assert group_products_twin(codes, unit, 4)[0, 0].tolist() == expected
    assert group_products(codes, unit, 4)[0, 0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bits", [16, 8])
def test_each_group_answers_with_its_best_token(bits: int) -> None:
    codes = torch.zeros(1, BLOCKS, GROUP, GROUPS, 8)
    codes[0, 1, 2, 5] = 3  # block 1, token 2 of group 5
    codes[0, 1, 3, 5] = -100
    stored = codes.bfloat16() if bits == 16 else codes.to(torch.int8)
    products = group_products(stored, torch.ones(1, 1, 8), bits)[0, :, 0]
    expected = torch.zeros(BLOCKS * GROUPS)
    expected[GROUPS + 5] = 24
    assert torch.allclose(products, expected, rtol=1e-4)


def test_a_query_of_zeros() -> None:
    assert (group_products(random_codes(1, 8, 8), torch.zeros(1, 2, 8), 8) == 0).all()
