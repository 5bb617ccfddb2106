"""Norms, rotations and gates in one launch: both forms against transformers' lines in float64."""

from typing import Any

import pytest
import torch

from penstock.kernels.device import elementwise
from penstock.testing.pairs import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Two roundings of numbers of about one; of float32 a few."""


def kernel(name: str, form: str) -> Any:
    if form == "torch":
        return getattr(elementwise, f"{name}_twin")
    from penstock.kernels.device import elementwise_triton

    return getattr(elementwise_triton, f"{name}_triton")


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.is_contiguous()
    tolerance = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), exact.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1, 48), (3, 1, 4096), (2, 1, 5, 128), (1, 1, 5120)])
def test_norms(device: torch.device, form: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    torch.manual_seed(size[-1])
    hidden = (3 * torch.randn(size)).to(device, dtype)
    weight = (1 + 0.1 * torch.randn(size[-1])).to(device, dtype)
    found = kernel("rms_norm", form)(hidden, weight, 1e-5)
    assert (found.shape, found.dtype) == (hidden.shape, dtype)
    wide = hidden.double()
    root = (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(found, weight.double() * wide / root)


@pytest.mark.parametrize(
    ("dtype", "sizes", "shared"),
    covering(DTYPES, [(1, 4, 2, 12), (3, 5, 1, 128), (2, 4, 0, 64)], [False, True]),
)
def test_rotations(
    device: torch.device, form: str, dtype: torch.dtype, sizes: tuple[int, int, int, int],
    shared: bool,
) -> None:  # fmt: skip
    """Queries and keys as a layer has them, transposed; positions of each row, or one for all."""
    batch, heads, key_heads, dim = sizes
    torch.manual_seed(dim)
    query = torch.randn(batch, 1, heads, dim).to(device, dtype).transpose(1, 2)
    key = torch.randn(batch, 1, key_heads + 1, dim).to(device, dtype)[:, :, 1:].transpose(1, 2)
    angle = 9 * torch.randn(1 if shared else batch, 1, dim // 2)
    cos, sin = (part.repeat(1, 1, 2).to(device, dtype) for part in (angle.cos(), angle.sin()))
    found = kernel("rotate", form)(query, key, cos, sin)
    for mine, states in zip(found, (query, key), strict=True):
        assert mine.shape == states.shape
        first, second = states.double().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        exact = states.double() * cos[:, None].double() + turned * sin[:, None].double()
        tolerance = 4 * ROUNDING[dtype]
        torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1, 64), (3, 1, 1500)])
def test_gates(device: torch.device, form: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    torch.manual_seed(size[-1])
    gate, up = ((4 * torch.randn(size)).to(device, dtype) for _ in range(2))
    gate.view(-1)[:3] = torch.tensor([0.0, -80.0, 80.0])
    found = kernel("gated", form)(gate, up)
    wide = gate.double()
    close(found, wide / (1 + (-wide).exp()) * up.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_round_alike(device: torch.device, triton: None, dtype: torch.dtype) -> None:
    """The same numbers but for the order of a sum and the last bit of an exponential."""
    torch.manual_seed(0)
    hidden = torch.randn(4, 1, 512).to(device, dtype)
    weight = torch.randn(512).to(device, dtype)
    query = torch.randn(4, 8, 1, 64).to(device, dtype)
    cos, sin = torch.rand(2, 4, 1, 64).to(device, dtype)
    for name, given in (
        ("rms_norm", (hidden, weight, 1e-6)), ("gated", (hidden, hidden.flip(-1).contiguous())),
        ("rotate", (query, query, cos, sin)),
    ):  # fmt: skip
        plain, fast = (kernel(name, form)(*given) for form in ("torch", "triton"))
        pairs = zip(plain, fast, strict=True) if name == "rotate" else [(plain, fast)]
        for one, other in pairs:
            if one.is_cuda:  # a compiler joins a product and a sum, which then are rounded once
                rtol = atol = 4 * ROUNDING[dtype]
            else:
                cut_off = dtype == torch.bfloat16  # so Triton's interpreter rounds
                rtol, atol = (0.04, 0.04) if cut_off else (1e-2, 1e-6)
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
            if not one.is_cuda and not cut_off:
                unequal = (one != other).double().mean().item()
                assert unequal <= (0.3 if dtype == torch.float32 else 0.02)
