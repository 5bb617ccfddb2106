"""TokenPool: views of one memory; and copies of rows within one tensor."""

import math

import pytest
import torch

from penstock.core.shape import KVShape
from penstock.engine.tiers import token_pool as pool_module
from penstock.engine.tiers.token_pool import TokenPool, copy_rows

SHAPE = KVShape(num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=3, dtype=torch.float32)


def make_pool() -> TokenPool:
    memory = torch.zeros(2 * 5, 4 * SHAPE.token_bytes, dtype=torch.uint8)
    return TokenPool(memory, SHAPE, batch=2, num_slots=3, kept_slots=2, group_tokens=4)


def test_a_slot_is_one_contiguous_piece() -> None:
    pool = make_pool()
    pool.tokens[1, 4:8] = torch.arange(4 * 2 * 2 * 3).view(4, 2, 2, 3).float()
    row = pool.memory[1 * pool.slots_per_row + 1].view(torch.float32)
    assert row.tolist() == list(range(48))
    assert pool.keys.shape == pool.values.shape == (2, 2, 20, 3)
    assert pool.keys[1, :, 4].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert pool.values[1, :, 4].flatten().tolist() == [6, 7, 8, 9, 10, 11]
    assert pool.keys.data_ptr() == pool.memory.data_ptr()


def test_hiding_slots_leaves_sinks_and_window() -> None:
    pool = make_pool()
    assert (pool.mask == -math.inf).all()
    pool.slot_mask[:] = 0.0
    pool.hide_slots()
    assert (pool.mask[:, :12] == -math.inf).all()
    assert (pool.mask[:, 12:] == 0).all()
    assert pool.kept_tokens().shape[1] == 8


@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 2, 0], [0, 0, 0]])
@pytest.mark.parametrize("step_bytes", [1, 40, 1 << 20])
def test_rows_of_one_tensor(
    rows: list[int], step_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "COPY_BYTES", step_bytes)
    tensor = torch.randn(3, 7, 2)
    expected = tensor[rows].clone()
    copy_rows(tensor, tensor, torch.tensor(rows))
    assert torch.equal(tensor, expected)


def test_rows_of_another_batch() -> None:
    source, target = torch.randn(2, 7, 2), torch.zeros(4, 7, 2)
    copy_rows(target, source, torch.tensor([1, 1, 0, 1]))
    assert torch.equal(target, source[[1, 1, 0, 1]])
