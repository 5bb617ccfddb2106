"""RankMeter: the error of outputs over what few components select, against a plain computation."""

import math

import pytest
import torch
from torch import Tensor

from penstock.models import rank_meter
from penstock.models.rank_meter import QUERIES, RankMeter

KV_HEADS, HEADS, DIM, TOKENS = 2, 4, 16, 1024
JOINT = KV_HEADS * DIM


def heads(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    query = 4 * torch.randn(HEADS, QUERIES, DIM)
    return query, torch.randn(KV_HEADS, TOKENS, DIM), torch.randn(KV_HEADS, TOKENS, DIM)


def outputs(query: Tensor, keys: Tensor, values: Tensor, kept: Tensor | None = None) -> Tensor:
    """Attention of the last tokens, one at a time. kept: [queries, tokens]"""
    out = torch.zeros_like(query)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        for i in range(QUERIES):
            seen = torch.arange(TOKENS) <= TOKENS - QUERIES + i
            if kept is not None:
                seen = seen & kept[i]
            logits = keys[kv_head, seen] @ query[head, i] / math.sqrt(DIM)
            out[head, i] = logits.softmax(0) @ values[kv_head, seen]
    return out


def selection(query: Tensor, keys: Tensor, basis: Tensor) -> Tensor:
    """What KVSwap with window and sinks would attend to. bool [queries, tokens]"""
    components = keys.transpose(0, 1).reshape(TOKENS, JOINT) @ basis
    kept = torch.zeros(QUERIES, TOKENS, dtype=torch.bool)
    for i in range(QUERIES):
        now = TOKENS - QUERIES + i
        shares = torch.zeros(TOKENS // 4)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            projected = query[head, i] @ basis[kv_head * DIM : (kv_head + 1) * DIM]
            logits = components @ projected / math.sqrt(DIM)
            logits[now + 1 :] = float("-inf")
            shares += logits.view(-1, 4).amax(1).softmax(0)
        best = shares.topk(TOKENS // 4 // 16).indices
        kept[i] = (torch.arange(TOKENS) // 4)[:, None].eq(best).any(1)
        kept[i, :4] = True
        kept[i, now - 63 :] = True
    return kept


def test_as_computed_one_by_one() -> None:
    query, keys, values = heads()
    basis = torch.linalg.qr(torch.randn(JOINT, JOINT)).Q[:, :24]
    meter = RankMeter(2, 24)
    meter.add_text()
    meter.add(1, query, keys, values, basis)
    true = outputs(query, keys, values)

    def error(by: Tensor) -> Tensor:
        found = outputs(query, keys, values, selection(query, keys, by))
        return (found - true).norm(dim=-1) / true.norm(dim=-1)

    floor = error(torch.eye(JOINT))
    expected = [
        float((error(basis[:, :rank]) - floor).clamp_min(0).mean(1).max()) ** 2
        for rank in (8, 16, 24)
    ]
    assert meter.errors()[1] == pytest.approx(expected, rel=1e-3)
    assert meter.errors()[0] == (0, 0, 0)
    assert expected[0] > 0.01, "there is something to see"


def test_a_whole_basis_costs_nothing() -> None:
    query, keys, values = heads(1)
    meter = RankMeter(1, JOINT)
    meter.add_text()
    meter.add(0, query, keys, values, torch.linalg.qr(torch.randn(JOINT, JOINT)).Q)
    *others, last = meter.errors()[0]
    assert last < 1e-4 < min(others)


def test_the_mean_over_texts() -> None:
    basis = torch.linalg.qr(torch.randn(JOINT, JOINT)).Q[:, :8]
    alone = []
    both = RankMeter(1, 8)
    for seed in (2, 3):
        one = RankMeter(1, 8)
        for meter in (one, both):
            meter.add_text()
            meter.add(0, *heads(seed), basis)
        alone.append(one.errors()[0][0])
    assert both.errors()[0][0] == pytest.approx(sum(alone) / 2)
    assert alone[0] != alone[1]


@pytest.mark.parametrize("rank", [4, 8])
def test_nothing_measured(rank: int) -> None:
    assert RankMeter(3, rank).errors() == ()
    meter = RankMeter(3, 4)
    meter.add_text()
    assert meter.errors() == (), "fewer components than a step"


def test_few_queries_and_a_ragged_end() -> None:
    query, keys, values = heads(4)
    meter = RankMeter(1, 8)
    meter.add_text()
    meter.add(0, query[:, :3], keys[:, :1021], values[:, :1021], torch.eye(JOINT)[:, :8])
    assert meter.errors()[0][0] > 0
    assert rank_meter.LEAST_TOKENS > rank_meter.WINDOW_TOKENS
