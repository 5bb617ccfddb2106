"""Blocks that are added one after the other are one softmax, compiled and by torch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.native import compiled
from penstock.kernels.plain_attention import attention_twin
from penstock.kernels.prompt_attention import Softmax, add_block, add_block_twin
from penstock.testing.pairs import covering

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FORMS = [("auto", dtype) for dtype in TOLERANCE]
FORMS += [("avx512", torch.bfloat16), ("off", torch.bfloat16), ("off", torch.float32)]
"""A level of the compiled kernels, and a dtype."""


@pytest.mark.parametrize(
    ("form", "shape", "sizes", "masking", "causal"),
    covering(
        FORMS, [(14, 2, 16), (4, 4, 80), (3, 1, 64)], [(37, 300), (5, 33), (1, 1), (9, 1030)],
        ["none", "padded", "empty row"], [False, True],
    ),
)  # fmt: skip
def test_blocks_are_one_softmax(
    form: tuple[str, torch.dtype], shape: tuple[int, int, int], sizes: tuple[int, int],
    masking: str, causal: bool,
) -> None:  # fmt: skip
    """A past of two blocks, of which the second holds what is hidden, and the queries' own keys."""
    (level, dtype), (heads, kv_heads, dim), (queries, tokens) = form, shape, sizes
    torch.manual_seed(tokens)
    query = torch.randn(2, queries, heads, dim).to(dtype).transpose(1, 2)
    pool = torch.randn(2, tokens + queries, 2, kv_heads, dim).to(dtype)
    keys, values = pool[:, :, 0].transpose(1, 2), pool[:, :, 1].transpose(1, 2)
    hidden = torch.zeros(2, tokens + queries, dtype=torch.bool)
    hidden[0, : tokens // 3] = masking != "none"
    hidden[1, :tokens] = masking == "empty row"
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    options: dict[str, Any] = {"scaling": dim**-0.5}
    compiled.limit(level)
    try:
        found: Softmax | None = None
        for at, end in ((tokens, tokens + queries), (0, tokens // 2), (tokens // 2, tokens)):
            if at == end:
                continue
            part = None if masking == "none" else mask[:, at:end].to(dtype)
            found = add_block(
                found, query, keys[:, :, at:end], values[:, :, at:end], key_mask=part,
                causal=causal and at == tokens, **options,
            )  # fmt: skip
    finally:
        compiled.limit("auto")
    order = torch.arange(tokens + queries) - tokens
    shown = ~hidden[:, None, None] & ((order <= torch.arange(queries)[:, None]) | (not causal))
    expected = attention_twin(query, keys, values, mask=shown, **options)
    assert found is not None
    assert_same((found[0].transpose(1, 2), found[1]), expected, TOLERANCE[dtype])


def test_queries_that_have_seen_nothing() -> None:
    query, keys = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 8, 16)
    mask = torch.full((1, 8), -math.inf)
    for add in (add_block, add_block_twin):
        found = None
        for _ in range(2):
            found = add(found, query, keys, keys, scaling=1.0, key_mask=mask)
        assert found is not None
        assert (found[0] == 0).all()
        assert (found[1] == -math.inf).all()


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tol: float) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, atol=tol, rtol=tol)
