"""Arithmetic of shapes, sectors and refusals."""

from dataclasses import replace

import pytest
import torch

from penstock.core.errors import BudgetError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.core.stats import PhaseStats

SHAPE = KVShape(
    num_layers=3, num_query_heads=8, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16
)  # fmt: skip


def request(limit: int | None = None, sector: int = 512, cpu: bool = True) -> SizingRequest:
    return SizingRequest(
        shape=SHAPE, batch=2, max_tokens=100, limit_bytes=limit, sector_bytes=sector,
        device_is_cpu=cpu, has_adapter=True,
    )  # fmt: skip


def test_shape() -> None:
    assert SHAPE.queries_per_kv_head == 4
    assert SHAPE.joint_dim == 32
    assert SHAPE.token_bytes == 2 * 32 * 2
    assert SHAPE.full_cache_bytes(2, 100) == 3 * 2 * 100 * 128


@pytest.mark.parametrize(
    ("group_tokens", "sector", "padded_bytes"),
    [(4, 512, 512), (3, 512, 512), (5, 512, 1024), (4, 4096, 4096), (32, 4096, 4096)],
)
def test_rows_are_whole_sectors(group_tokens: int, sector: int, padded_bytes: int) -> None:
    asked = request(sector=sector)
    assert asked.padded_bytes(group_tokens) == padded_bytes
    assert asked.is_direct(group_tokens) == (group_tokens * 128 == padded_bytes)


def test_reads_never_land_in_gpu_memory() -> None:
    assert not request(cpu=False).is_direct(4)


def test_require() -> None:
    request(None).require(10**12, "anything")
    request(1000).require(1000, "just enough")
    with pytest.raises(BudgetError, match=r"1000 B is too little for kvswap .*\(1001 bytes\)") as e:
        request(1000).require(1001, "kvswap")
    assert e.value.needed_bytes == 1001


def test_a_refusal_counts_sequences_and_not_their_heads() -> None:
    for rows, said in ((2, "1 sequence of"), (4, "2 sequences of"), (1, "1 sequence of")):
        heads = 1 if rows == 1 else 2
        asked = replace(request(1000), batch=rows, rows_per_sequence=heads, max_tokens=4104)
        with pytest.raises(BudgetError, match=rf"{said} 4,104 tokens, prompt and answer"):
            asked.require(1001, "louiskv")


def test_rates_of_an_idle_phase_are_zero() -> None:
    idle = PhaseStats()
    assert (idle.hit_rate, idle.stall_share, idle.read_bytes_per_token) == (0.0, 0.0, 0.0)
    busy = PhaseStats(
        tokens=4, seconds=2.0, read_bytes=80, units_wanted=10, units_hit=4, stall_s=0.5
    )
    assert (busy.hit_rate, busy.stall_share, busy.read_bytes_per_token) == (0.4, 0.25, 20.0)
