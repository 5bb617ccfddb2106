"""The hot pool in the host's memory: the same answers as with slots of the device's own."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.engine.tiers.slot_table import ABSENT
from penstock.methods.hillinfer.host_pool import HostPoolLayer, host_pool_bytes
from penstock.methods.hillinfer.policy import HillInfer

SHAPE = KVShape(num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
PROMPT, MOST, ROWS = 300, 420, 2
STEPS = (1,) * 5
POLICY = HillInfer(selected_tokens=40, hot_tokens=90, window_tokens=16, near=False)
ON_HOST = replace(POLICY, host_memory="1MiB")
REQUEST = SizingRequest(
    shape=SHAPE, batch=ROWS, max_tokens=MOST, limit_bytes=None, sector_bytes=512,
    device_is_cpu=False, has_adapter=False, must_tier=True,
)  # fmt: skip


def runtime_of(policy: HillInfer, store: str = "memory", **options: Any) -> TieredRuntime:
    settings = RuntimeSettings(
        shape=SHAPE, policy=policy, limit_bytes=None, store=store, max_tokens=MOST, exact=False,
        adapter=None, device=torch.device("cpu"), must_tier=True, **options,
    )  # fmt: skip
    return TieredRuntime(settings, ROWS)


class Draw:
    """Random calls, the same each time."""

    def __init__(self, padding: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._shown = torch.arange(MOST) >= torch.tensor([0, padding])[:, None]
        self._padding = padding

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(*size, SHAPE.head_dim, generator=self._generator)

    def pass_through(self, runtime: TieredRuntime, count: int) -> Tensor:
        """What all layers answer. [layers, rows, count, heads, head_dim]"""
        rows, length, found = runtime.batch or ROWS, runtime.length + count, []
        shown = self._shown[:rows, :length] if self._padding else None
        for layer in range(SHAPE.num_layers):
            query, keys, values = self(rows, 4, count), self(rows, 2, count), self(rows, 2, count)
            call = AttentionCall(query, keys, values, 0.125, visible=shown)
            found.append(runtime.attend(layer, call))
        return torch.stack(found)


class Both:
    """One cache with slots of the device's own, and one with the host's."""

    def __init__(self, folder: Path, padding: int = 0) -> None:
        self.runtimes = runtime_of(POLICY, str(folder)), runtime_of(ON_HOST)
        self._draws = Draw(padding), Draw(padding)

    def feed(self, *counts: int) -> None:
        """Passes of so many tokens, with equal answers."""
        for count in counts:
            beside, on_host = (
                draw.pass_through(runtime, count)
                for draw, runtime in zip(self._draws, self.runtimes, strict=True)
            )
            torch.testing.assert_close(beside, on_host)

    def each(self, change: Callable[[TieredRuntime], None]) -> None:
        for runtime in self.runtimes:
            change(runtime)


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    made = Both(tmp_path, getattr(request, "param", 0))
    yield made
    made.each(TieredRuntime.close)


@pytest.mark.parametrize("both", [0, 40], indirect=True)
def test_answers_are_those_of_slots_on_the_device(both: Both) -> None:
    both.feed(PROMPT, *STEPS)
    both.each(lambda runtime: runtime.crop(PROMPT - 7))
    both.feed(*STEPS, 20, *STEPS)
    assert all(isinstance(layer, HostPoolLayer) for layer in both.runtimes[1].layers)
    assert both.runtimes[1].stats.decode.units_hit > 0


def test_rows_change_places_and_leave(both: Both) -> None:
    both.feed(PROMPT, *STEPS)
    for rows in ([1, 0], [1, 1], [0]):
        both.each(methodcaller("select_rows", torch.tensor(rows)))
        both.feed(*STEPS)
    both.each(TieredRuntime.reset)
    both.feed(100, *STEPS)


def test_hot_tokens_stay_on_the_host() -> None:
    """The device's slots hold one selection, and other layers' in turn."""
    runtime, draw = runtime_of(ON_HOST), Draw()
    seen: dict[int, Tensor] = {}
    try:
        draw.pass_through(runtime, PROMPT)
        layers = [layer for layer in runtime.layers if isinstance(layer, HostPoolLayer)]
        assert len(layers) == SHAPE.num_layers
        for layer in layers:
            layer.observer = seen.__setitem__
        for _ in range(3):
            draw.pass_through(runtime, 1)
        assert runtime.plan.num_slots == 40
        assert runtime.plan.shared_pools
        assert layers[0].pool.memory is layers[2].pool.memory
        kept = runtime.plan.kept_slots
        for layer in layers:
            assert (layer.table.unit_in != ABSENT).sum() == ROWS * 90
            attended = seen[layer.layer_idx].sum(dim=1)
            assert ((attended >= 40 + 16) & (attended <= 40 + kept)).all()
    finally:
        runtime.close()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_budget_is_the_devices(on_cpu: bool) -> None:
    """Host memory is beside it, but where the device has no other."""
    request = replace(REQUEST, device_is_cpu=on_cpu)
    few = HillInfer(selected_tokens=40, host_memory=host_pool_bytes(request, 60)).plan(request)[1]
    more = HillInfer(selected_tokens=40, host_memory=host_pool_bytes(request, 200)).plan(request)[1]
    assert (few.host_slots, more.host_slots, more.num_slots) == (60, 200, 40)
    pools = host_pool_bytes(request, 200) - host_pool_bytes(request, 60)
    in_budget = more.pool_bytes - few.pool_bytes
    assert (in_budget, more.host_bytes - few.host_bytes) == ((pools, 0) if on_cpu else (0, pools))


def test_a_smaller_selection_is_made_where_the_host_has_little() -> None:
    request = replace(REQUEST, limit_bytes=10**9)
    plan = HillInfer(host_memory=host_pool_bytes(request, 30)).plan(request)[1]
    assert (plan.host_slots, plan.selected_units) == (30, 21)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_memory": 4096, "selected_tokens": 40}, "makes 0 hot tokens a row, and a step sel"),
        ({"host_memory": "1MiB", "hot_tokens": 9, "selected_tokens": 40}, "makes 9 hot tokens"),
        ({"host_memory": 4096}, "makes 0 hot tokens a row"),
        ({"host_memory": 0}, "host_memory=0 must be above 0"),
        ({"host_memory": "1MiB", "attend": "hot"}, "wants attend=selected"),
    ],
)
def test_what_does_not_go_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HillInfer(**options).plan(replace(REQUEST, limit_bytes=10**9))
