"""The fast kernels mean what their twin means, and the twin means torch's SDPA."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels import attention
from penstock.kernels.attention import attention_block
from penstock.kernels.plain_attention import attention_twin
from penstock.testing.pairs import covering

BATCH, HEAD_DIM = 3, 16
SCALING = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def block(
    heads: int, kv_heads: int, queries: int, tokens: int, dtype: torch.dtype, strided: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys, values; strided ones are views of a pool, as in the decode loop."""
    torch.manual_seed(heads * 1000 + queries * 100 + tokens)
    query = torch.randn(BATCH, heads, queries, HEAD_DIM).to(dtype)
    if strided:
        pool = torch.randn(BATCH, tokens + 5, 2, kv_heads, HEAD_DIM).to(dtype)[:, 2 : tokens + 2]
        return query, pool[:, :, 0].transpose(1, 2), pool[:, :, 1].transpose(1, 2)
    keys = torch.randn(2, BATCH, kv_heads, tokens, HEAD_DIM).to(dtype)
    return query, keys[0], keys[1]


def padding(tokens: int, dtype: torch.dtype, empty_row: bool) -> tuple[Tensor, Tensor]:
    """Left padding: row 0 has none, the last row is all padding if asked for."""
    hidden = torch.tensor([0, tokens // 3, tokens if empty_row else tokens // 2])
    visible = torch.arange(tokens) >= hidden[:, None]
    mask = torch.zeros(BATCH, tokens, dtype=dtype).masked_fill(~visible, -math.inf)
    return visible, mask


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tol: float) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert got.shape == wanted.shape
        assert torch.equal(got.isinf(), wanted.isinf())
        assert not got.isnan().any()
        finite = ~wanted.isinf()
        assert torch.allclose(got[finite].float(), wanted[finite], atol=tol, rtol=tol)
    assert actual[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "masking", "strided", "queries", "shape", "softcap"),
    covering(
        list(TOLERANCE), ["none", "padded", "empty row"], [False, True], [1, 7],
        [(4, 4), (4, 2), (6, 1)], [None, 2.0],
    ),
)  # fmt: skip
def test_past_block(
    shape: tuple[int, int], queries: int, strided: bool, masking: str, dtype: torch.dtype,
    softcap: float | None,
) -> None:  # fmt: skip
    (heads, kv_heads), tokens = shape, 23
    query, keys, values = block(heads, kv_heads, queries, tokens, dtype, strided)
    visible, mask = padding(tokens, dtype, masking == "empty row")
    options: dict[str, Any] = {"scaling": SCALING, "softcap": softcap}
    fast = attention_block(
        query, keys, values, key_mask=None if masking == "none" else mask, **options
    )
    shown = None if masking == "none" else visible[:, None, None]
    slow = attention_twin(query, keys, values, mask=shown, **options)
    assert_same(fast, slow, TOLERANCE[dtype])
    if masking == "empty row":
        assert (slow[0][2] == 0).all()
        assert (slow[1][2] == -math.inf).all()


@pytest.mark.parametrize(
    ("dtype", "masking", "tokens", "kv_heads", "softcap"),
    covering(list(TOLERANCE), ["none", "padded", "empty row"], [1, 5, 40], [4, 2], [None, 2.0]),
)
def test_causal_block(
    kv_heads: int, tokens: int, masking: str, dtype: torch.dtype, softcap: float | None
) -> None:
    heads = 4
    query, keys, values = block(heads, kv_heads, tokens, tokens, dtype, False)
    visible, mask = padding(tokens, dtype, masking == "empty row")
    options: dict[str, Any] = {"scaling": SCALING, "softcap": softcap, "causal": True}
    fast = attention_block(
        query, keys, values, key_mask=None if masking == "none" else mask, **options
    )
    shown = None if masking == "none" else visible[:, None, None]
    assert_same(fast, attention_twin(query, keys, values, mask=shown, **options), TOLERANCE[dtype])


def test_softcap_in_strips_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain path cuts the queries into strips; the cuts do not show."""
    monkeypatch.setattr(attention, "_TWIN_QUERY_ROWS", 7)
    query, keys, values = block(4, 2, 20, 20, torch.float32, False)
    options: dict[str, Any] = {"scaling": SCALING, "softcap": 3.0, "causal": True}
    assert_same(
        attention_block(query, keys, values, **options),
        attention_twin(query, keys, values, **options),
        1e-6,
    )


def test_a_promise_of_no_empty_row_changes_nothing() -> None:
    query, keys, values = block(4, 2, 1, 23, torch.float32, True)
    _, mask = padding(23, torch.float32, empty_row=False)
    sure = attention_block(query, keys, values, scaling=SCALING, key_mask=mask, never_empty=True)
    assert_same(
        sure, attention_block(query, keys, values, scaling=SCALING, key_mask=mask), 0.0
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_twin_is_sdpa(heads: int, kv_heads: int, causal: bool) -> None:
    query, keys, values = block(heads, kv_heads, 19, 19, torch.float32, False)
    visible, _ = padding(19, torch.float32, empty_row=False)
    shown = visible[:, None, None] | torch.eye(19, dtype=torch.bool)  # SDPA has no empty rows
    if causal:
        shown = shown & torch.ones(19, 19, dtype=torch.bool).tril()
    expected = scaled_dot_product_attention(
        query, keys, values, attn_mask=shown, scale=SCALING, enable_gqa=True
    )
    out, lse = attention_twin(query, keys, values, scaling=SCALING, mask=shown)
    assert torch.allclose(out, expected, atol=1e-6)
    logits = query @ keys.repeat_interleave(heads // kv_heads, dim=1).transpose(-1, -2) * SCALING
    expected_lse = logits.masked_fill(~shown, -math.inf).logsumexp(-1)
    assert torch.allclose(lse, expected_lse, atol=1e-6)
