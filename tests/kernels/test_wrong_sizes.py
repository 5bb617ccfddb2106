"""What does not belong together is refused before compiled code reads as far as it was told."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.decode_attention import decode_attention
from penstock.kernels.group_scores import group_scores
from penstock.kernels.group_selection import GroupSelection
from penstock.kernels.int8_linear import Int8Linear
from penstock.kernels.low_rank import project_keys, project_queries, store_codes
from penstock.kernels.native.compiled import kernel
from penstock.kernels.pool_scores import logit_sums, pool_logits
from penstock.kernels.predicted_query import PredictedQuery
from penstock.kernels.put_token import PutToken
from penstock.kernels.query_steps import rms_norm, turn_query

RANK, DIM, KV_HEADS, HEADS = 16, 32, 2, 4
BASIS, FACTOR = torch.ones(KV_HEADS * DIM, RANK), torch.ones(RANK)
CODES = torch.zeros(2, 1, 2, 8, RANK, dtype=torch.int8)
POOL, MASK = torch.zeros(2, 5, 2, KV_HEADS, DIM), torch.zeros(2, 5)
QUERY = torch.ones(2, HEADS, DIM)
CALLS: dict[str, Callable[[], object]] = {
    "a norm's weight": lambda: rms_norm(torch.ones(2, 64), torch.ones(48), 1e-6),
    "cos": lambda: turn_query(QUERY, torch.ones(1, DIM), torch.ones(1, DIM - 16)),
    "a head's norm": lambda: turn_query(
        QUERY, torch.ones(1, DIM), torch.ones(1, DIM), torch.ones(DIM - 16)
    ),
    "a linear layer's input": lambda: Int8Linear(torch.ones(8, 128), None)(torch.ones(1, 64)),
    "a basis of fewer heads": lambda: project_queries(QUERY, BASIS[:DIM], KV_HEADS, FACTOR),
    "a query's factor": lambda: project_queries(QUERY, BASIS, KV_HEADS, FACTOR[:-1]),
    "a key's factor": lambda: project_keys(
        torch.ones(1, 2, KV_HEADS, DIM), BASIS, FACTOR[: RANK // 2]
    ),
    "a decode mask": lambda: decode_attention(QUERY[:, :, None], POOL, MASK[:, :-2], 1.0),
    "a pool of fewer rows": lambda: decode_attention(QUERY[[0, 1, 0], :, None], POOL, MASK, 1.0),
    "a pool's mask": lambda: pool_logits(QUERY, POOL, MASK[:, :-2], 1.0),
    "a pool's head": lambda: pool_logits(QUERY, POOL[..., :16].contiguous(), MASK, 1.0),
    "normalisers": lambda: logit_sums(torch.zeros(2, 4, 5), torch.zeros(2, 3)),
    "keys of more heads": lambda: PutToken(POOL, MASK)(
        torch.ones(2, 3, 1, DIM), torch.ones(2, 3, 1, DIM), 0
    ),
    "a place behind the window": lambda: PutToken(POOL, MASK)(
        torch.ones(2, KV_HEADS, 1, DIM), torch.ones(2, KV_HEADS, 1, DIM), 5
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_torch_refuses_what_the_kernel_would_read_past(call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        call()


@pytest.mark.parametrize(
    ("codes", "basis", "factor"),
    [
        (CODES, BASIS, FACTOR[:-1]),
        (CODES, BASIS[:-1], FACTOR),
        (CODES[..., :8], BASIS, FACTOR),
        (CODES.transpose(2, 3), BASIS, FACTOR),
        (CODES, BASIS, FACTOR.double()),
        (CODES, BASIS, FACTOR[:, None]),
    ],
    ids=["factor", "basis", "width", "turned", "dtype", "matrix"],
)
def test_a_selection_of_parts_that_do_not_belong_together(
    codes: Tensor, basis: Tensor, factor: Tensor
) -> None:
    with pytest.raises(ConfigError, match="do not belong together"):
        GroupSelection(codes, basis, factor, 8, HEADS, KV_HEADS)


@pytest.mark.skipif(kernel("select_groups") is None, reason="no VNNI here")
def test_a_call_reads_no_further_than_the_codes() -> None:
    selection = GroupSelection(CODES, BASIS, FACTOR, 8, HEADS, KV_HEADS)
    assert selection.best(QUERY, 0, 8, 2).shape == (2, 2)
    with pytest.raises(AssertionError):
        selection.best(QUERY, 0, 9, 2)
    with pytest.raises(AssertionError):
        selection.best(torch.ones(3, HEADS, DIM), 0, 8, 2)
    with pytest.raises(AssertionError):
        group_scores(CODES, torch.ones(2, HEADS, RANK), 8, 9)
    with pytest.raises(AssertionError):
        store_codes(torch.ones(2, 4, RANK), CODES.clone(), 8, 7)


def test_weights_of_other_sizes_are_left_to_torch() -> None:
    linear = Int8Linear(torch.ones(HEADS * DIM, 64), torch.ones(HEADS * DIM))
    assert PredictedQuery(torch.ones(64), 1e-6, linear, DIM, None, 0.0)._belong()
    for norm, of_head in ((torch.ones(1), None), (torch.ones(64), torch.ones(HEADS * DIM))):
        assert PredictedQuery(norm, 1e-6, linear, DIM, of_head, 0.0)._kernel is None
