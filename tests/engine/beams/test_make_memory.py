"""Memory of a search from a budget: what a refusal asks for is enough."""

import re
from typing import Any

import pytest
import torch

from penstock.core.byte_size import parse_bytes
from penstock.core.errors import BudgetError
from penstock.core.shape import KVShape
from penstock.engine.beams.beam_memory import BlockShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.engine.beams.make_beam_memory import STRATEGIES, MemoryRequest, make_beam_memory

KV = KVShape(num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=24, dtype=torch.float32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_refusal_asks_for_is_enough(strategy: str) -> None:
    settings: dict[str, Any] = {
        "shape": BlockShape(kv=KV, block_tokens=16, windows=(None,) * 3), "beams": 6,
        "max_tokens": 790, "device": torch.device("cpu"), "store": "memory",
        "strategy": strategy, "settings": ScheduleSettings(), "prefetch": True,
    }  # fmt: skip
    with pytest.raises(BudgetError) as caught:
        make_beam_memory(MemoryRequest(**settings, limit_bytes=1 << 16))
    advice = re.search(r"give memory=(\S+)", str(caught.value))
    assert advice is not None
    assert parse_bytes(advice[1]) == caught.value.needed_bytes
    make_beam_memory(MemoryRequest(**settings, limit_bytes=parse_bytes(advice[1]))).close()
