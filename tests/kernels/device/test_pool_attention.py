"""Attention over a pool against a softmax in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.device.attention import pool_attention, pool_attention_twin
from penstock.kernels.slot_codes import codes_of, numbers_of

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = [  # rows, KV heads, query heads of each, head_dim, places
    (1, 1, 1, 32, 1),
    (2, 1, 4, 64, 33),
    (3, 2, 3, 32, 100),
    (1, 1, 8, 128, 300),
    (2, 4, 1, 16, 64),
    (1, 2, 17, 24, 70),
]


def run(
    form: str, query: Tensor, tokens: Tensor, mask: Tensor, scale: float,
    codes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output and log-sum-exp by the twin or by the launcher."""
    out = torch.full_like(query, 9.0, memory_format=torch.contiguous_format)
    if form == "torch":
        return [out, pool_attention_twin(query, tokens, mask, scale, out, codes)]
    from penstock.kernels.device.attention_triton import pool_attention_triton

    return [out, pool_attention_triton(query, tokens, mask, scale, out, codes)]


def exact(query: Tensor, tokens: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The softmax as it is written down; rows that see nothing give zero."""
    heads = query.shape[1] // tokens.shape[3]
    keys = tokens[:, :, 0].double().repeat_interleave(heads, dim=2)
    values = tokens[:, :, 1].double().repeat_interleave(heads, dim=2)
    logits = torch.einsum("rhd,rphd->rhp", query.double(), keys) * scale + mask.double()[:, None]
    weights = torch.softmax(logits, dim=-1).nan_to_num()
    return torch.einsum("rhp,rphd->rhd", weights, values), torch.logsumexp(logits, dim=-1)


def some_pool(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """A query, a pool and a mask that hides about half of it, but never a row's last place."""
    rows, kv_heads, heads, dim, places = shape
    torch.manual_seed(places)
    query = torch.randn(rows, kv_heads * heads, dim).to(device, dtype)
    tokens = torch.randn(rows, places, 2, kv_heads, dim).to(device, dtype)
    mask = torch.zeros(rows, places).masked_fill(torch.rand(rows, places) < 0.5, -math.inf)
    mask[:, -1] = 0.0
    return query, tokens, mask.to(device, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_one_softmax(
    device: torch.device, form: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    query, tokens, mask = some_pool(shape, dtype, device)
    out, lse = run(form, query, tokens, mask, 0.3)
    expected, expected_lse = exact(query, tokens, mask, 0.3)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=TOLERANCE[dtype])


def test_long_runs_of_hidden_places(device: torch.device, form: str) -> None:
    """Whole splits see nothing: one row sees only its end, one its middle, one nothing at all."""
    query, tokens, mask = some_pool((3, 1, 2, 32, 400), torch.float32, device)
    mask.fill_(-math.inf)
    mask[0, -2:] = 0.0
    mask[1, 200] = 0.0
    out, lse = run(form, query, tokens, mask, 0.2)
    expected, expected_lse = exact(query, tokens, mask, 0.2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    assert (out[2] == 0).all()
    torch.testing.assert_close(out[1], tokens[1, 200, 1].expand(2, -1))
    assert lse[2].tolist() == [-math.inf, -math.inf]
    torch.testing.assert_close(lse[:2].double(), expected_lse[:2], rtol=0, atol=2e-5)


@pytest.mark.usefixtures("triton")
def test_hidden_places_may_hold_anything(device: torch.device) -> None:
    """Slots that nothing was fetched into are as the allocator left them."""
    query, tokens, mask = some_pool((2, 1, 2, 32, 90), torch.float32, device)
    expected = exact(query, tokens, mask, 0.2)[0]
    tokens[mask.isinf()] = math.nan
    out, lse = run("triton", query, tokens, mask, 0.2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    assert lse.isfinite().all()


def test_strided_rows_and_large_logits(device: torch.device, form: str) -> None:
    """Queries come as a view of a projection, the mask as one of a longer one."""
    query, tokens, mask = some_pool((2, 2, 2, 32, 50), torch.float32, device)
    wide = torch.zeros(2, 3, 4, 32, device=device)
    wide[:, 1] = 40 * query
    longer = torch.full((2, 60), -math.inf, device=device)
    longer[:, :50] = mask
    out, _ = run(form, wide[:, 1], tokens, longer[:, :50], 1.0)
    expected, _ = exact(40 * query, tokens, mask, 1.0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_in_8_bits_are_the_numbers_they_stand_for(
    device: torch.device, form: str, dtype: torch.dtype
) -> None:
    """The first 70 places are codes, some of them hidden and no numbers."""
    query, tokens, mask = some_pool((2, 2, 3, 24, 110), dtype, device)
    tokens[mask.isinf()] = math.nan
    codes, rest = codes_of(tokens[:, :70]), tokens[:, 70:].nan_to_num().contiguous()
    numbers = torch.cat([numbers_of(codes, 2, 24, dtype), rest], dim=1).nan_to_num()
    out, lse = run(form, query, rest, mask, 0.3, codes)
    expected, expected_lse = exact(query, numbers, mask, 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=TOLERANCE[dtype])


def test_public_function(device: torch.device) -> None:
    query, tokens, mask = some_pool((2, 2, 2, 32, 50), torch.float32, device)
    expected, expected_lse = exact(query, tokens, mask, 0.5)
    out = torch.empty_like(query)
    assert pool_attention(query, tokens, mask, 0.5, out) is out
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    fresh, lse = pool_attention(query, tokens, mask, 0.5, with_lse=True)
    assert torch.equal(fresh, out)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)


@pytest.mark.gpu
def test_it_is_captured(device: torch.device, form: str, capture: Any) -> None:
    query, tokens, mask = some_pool((8, 1, 4, 128, 1100), torch.bfloat16, device)
    result: list[Tensor] = []
    graph = capture(lambda: result.extend(run(form, query, tokens, mask, 0.1)))
    for _ in range(3):
        query.normal_()
        tokens.normal_()
        graph.replay()
        out, lse = result[-2:]
        expected, expected_lse = exact(query, tokens, mask, 0.1)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-2)
