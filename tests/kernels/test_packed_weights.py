"""Weights in 8 and 4 bits: each way to a product says what the plain matrix of the codes says."""

import pytest
import torch

from penstock.kernels.native.compiled import kernel
from penstock.kernels.packed_weights import (
    BLOCK,
    FEW_ROWS,
    Int4Matrix,
    Int8Matrix,
    PackedMatrix,
    code_order,
    packing,
)

ROWS, WIDTH = 2 * BLOCK, 96


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("kind", [Int8Matrix, Int4Matrix])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_ways_are_the_twin(
    kind: type[Int8Matrix] | type[Int4Matrix], dtype: torch.dtype
) -> None:
    weight = drawn(ROWS, WIDTH)
    packed = kind.pack(weight, dtype)
    assert packed.shape == (ROWS, kind.row_bytes(WIDTH, dtype))
    matrix = kind(packed, WIDTH, dtype)
    assert (matrix.plain(0, ROWS).float() - weight).abs().max() < (0.05 if kind.bits == 8 else 0.5)
    tolerance = 8 * torch.finfo(dtype).eps
    for tokens in (1, FEW_ROWS, FEW_ROWS + 1):
        x = drawn(tokens, WIDTH).to(dtype)
        twin = matrix.twin(x).float()
        torch.testing.assert_close(
            matrix(x).float(), twin, rtol=tolerance, atol=tolerance * float(twin.abs().max())
        )


def test_errors_are_those_of_the_best_scales() -> None:
    weight = drawn(ROWS, 256) ** 3  # outliers, as weights have them
    made = Int4Matrix(Int4Matrix.pack(weight, torch.float32), 256, torch.float32)
    groups = weight.view(ROWS, -1, 32)
    scale = ((groups.amax(2) - groups.amin(2)) / 15)[..., None]
    nearest = (groups - groups.amin(2, keepdim=True)).div(scale).round()
    plain = nearest * scale + groups.amin(2, keepdim=True)
    to_the_nearest = (plain - groups).square().mean()
    assert (made.plain(0, ROWS) - weight).square().mean() < 0.9 * to_the_nearest


def test_important_columns_have_the_smaller_error() -> None:
    weight, importance = drawn(ROWS, 256), torch.ones(256)
    importance[::16], importance[1::16] = 1e4, 0
    wrong = {}
    for name, given in (("same", None), ("weighed", importance)):
        packed = Int4Matrix.pack(weight, torch.float32, importance=given)
        plain = Int4Matrix(packed, 256, torch.float32).plain(0, ROWS)
        assert plain.isfinite().all()
        wrong[name] = float(((plain - weight).square() * importance).mean())
    assert wrong["weighed"] < 0.5 * wrong["same"]
    none = Int4Matrix.pack(weight, torch.float32, importance=torch.zeros(256))
    assert Int4Matrix(none, 256, torch.float32).plain(0, ROWS).isfinite().all()


@pytest.mark.parametrize("levels", [16, 13, 9])
@pytest.mark.parametrize("least", [None, -0.3, 0.5])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_on_a_grid_stay_on_it(
    levels: int, least: float | None, stored: torch.dtype
) -> None:
    """As those of quantisation-aware training, or of a 4-bit file that was made plain."""
    draw = torch.Generator().manual_seed(levels)
    codes = torch.randint(0, levels, (ROWS, 8, 32), generator=draw).float()
    scale = torch.rand(ROWS, 8, 1, generator=draw) + 0.2
    offset = torch.full_like(scale, -8)
    if least is not None:
        offset = least * 8 * torch.rand(scale.shape, generator=draw)
    weight = ((codes + offset) * scale).flatten(1).to(stored)
    weight[::5] = drawn(len(weight[::5]), 256).to(stored)  # these rows are on none
    weight = weight.roll(1, 0)
    for importance in (torch.ones(256), drawn(256).square()):
        packed = Int4Matrix.pack(weight, stored, importance=importance)
        plain, factor = Int4Matrix(packed, 256, stored).plain(0, ROWS), importance.sqrt()
        difference = (plain.float() - weight.float()) * factor
        wrong = difference.norm(dim=1) / (weight.float() * factor).norm(dim=1)
        on_one = torch.arange(ROWS).sub(1).remainder(ROWS).remainder(5) != 0
        assert wrong[on_one].max() < (1e-5 if stored == torch.float32 else 1e-2)
        assert wrong[~on_one].min() > 0.03


@pytest.mark.parametrize("levels", [16, 11, 7])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_8_bits_miss_less_of_a_grid(levels: int, stored: torch.dtype) -> None:
    """Whose step and offset are nearly multiples of some scale; others are as they were."""
    draw = torch.Generator().manual_seed(levels)
    codes = torch.randint(0, levels, (ROWS, 8, 32), generator=draw).float()
    scale = torch.rand(ROWS, 8, 1, generator=draw) + 0.2
    offset = -levels * torch.rand(scale.shape, generator=draw)
    weight = ((codes + offset) * scale).flatten(1).to(stored)
    weight[1::5] = drawn(len(weight[1::5]), 256).to(stored)  # these rows are on none
    grouped = weight.float().view(ROWS, 8, 32)
    former = (grouped.abs().amax(dim=-1, keepdim=True) / 127).to(stored).float()
    rounded = (grouped / former).round() * former
    made = Int8Matrix(Int8Matrix.pack(weight, stored), 256, stored)
    plain = made.codes.view(ROWS, 8, 32).float() * made.scales.float()[..., None]
    before, behind = (
        (each - grouped).flatten(1).norm(dim=1) / grouped.flatten(1).norm(dim=1)
        for each in (rounded, plain)
    )
    on_one = torch.arange(ROWS).remainder(5) != 1
    gain = 0.55 if stored == torch.float32 else 0.75
    assert behind[on_one].mean() < gain * before[on_one].mean()
    assert (behind <= before * 1.001).all()
    assert torch.equal(plain[~on_one], rounded[~on_one])


def test_equal_and_extreme_weights() -> None:
    weight = torch.zeros(BLOCK, 64)
    weight[1], weight[2], weight[3, ::2], weight[4, 5] = 0.25, -3.0, 1e4, 1e-6
    for kind in (Int8Matrix, Int4Matrix):
        made = kind(kind.pack(weight, torch.float32), 64, torch.float32).plain(0, BLOCK)
        torch.testing.assert_close(made, weight, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("group", [32, 128])
def test_known_codes_are_put_and_read_back(group: int) -> None:
    draw = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (ROWS, 256 // group, group), generator=draw, dtype=torch.uint8)
    scale, offset = drawn(ROWS, 256 // group).abs(), drawn(ROWS, 256 // group)
    packed = torch.empty(ROWS, Int4Matrix.row_bytes(256, torch.float32, group), dtype=torch.uint8)
    matrix = Int4Matrix(packed, 256, torch.float32, group)
    for first in (0, BLOCK):
        rows = slice(first, first + BLOCK)
        matrix.put(first, codes[rows], scale[rows], offset[rows])
    plain = (codes.float() - 8) * scale[..., None] + offset[..., None]
    torch.testing.assert_close(matrix.plain(0, ROWS), plain.flatten(1))
    assert torch.equal(matrix.codes_of(BLOCK, ROWS), codes.flatten(1)[BLOCK:])
    assert torch.equal(matrix.content()[0], codes.flatten(1))


@pytest.mark.parametrize("group", [32, 128])
def test_products_of_few_tokens_are_the_twin(group: int) -> None:
    packed = Int4Matrix.pack(drawn(ROWS, 256), torch.bfloat16, group)
    matrix = Int4Matrix(packed, 256, torch.bfloat16, group)
    x = drawn(3, 256)
    x[:, 5] *= 100  # as some of a model's inputs are
    x[1, 64:128] = 0
    twin, made = matrix.twin(x.bfloat16()), matrix(x.bfloat16())
    torch.testing.assert_close(made, twin, rtol=0.01, atol=0.004 * float(twin.abs().max()))
    x[1, 7], x[2, 200] = torch.nan, torch.inf
    made = matrix(x.bfloat16())
    assert made[0].isfinite().all()
    assert not made[1:].isfinite().any()
    if kernel("int4_groups") is None:
        pytest.skip("torch's operator stood in for the kernel")


@pytest.mark.parametrize("group", [None, 32, 128])
def test_a_token_has_the_same_product_in_company(group: int | None) -> None:
    weight, dtype = drawn(ROWS, 384), torch.bfloat16
    if group is None:
        matrix: PackedMatrix = Int8Matrix(Int8Matrix.pack(weight, dtype), 384, dtype)
    else:
        matrix = Int4Matrix(Int4Matrix.pack(weight, dtype, group), 384, dtype, group)
    if kernel(f"int{matrix.bits}_groups") is None:
        pytest.skip("torch's operator stood in for the kernel")
    x = drawn(FEW_ROWS, 384).bfloat16()
    alone = torch.cat([matrix(row[None]) for row in x])
    for tokens in (2, 3, 5, FEW_ROWS):
        assert torch.equal(matrix(x[:tokens]), alone[:tokens])


def test_the_kernel_is_its_twin() -> None:
    matrix = Int4Matrix(Int4Matrix.pack(drawn(ROWS, WIDTH), torch.bfloat16), WIDTH, torch.bfloat16)
    for first, end in ((0, ROWS), (BLOCK, ROWS)):
        unpacked = matrix.transposed(first, end)
        assert torch.equal(unpacked, matrix.transposed_twin(first, end))
    if kernel("unpack_int4") is None:
        pytest.skip("the twin stood in for the kernel")


def test_what_fits() -> None:
    assert [Int4Matrix.fits(*size) for size in ((64, 32), (80, 32), (64, 48))] == [
        True,
        False,
        False,
    ]
    assert [Int8Matrix.fits(*size) for size in ((4, 32), (5, 32))] == [True, False]
    assert sorted(code_order()) == list(range(len(code_order())))
    assert packing() == packing()
