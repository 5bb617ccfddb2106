"""Units, sinks and window partition the past: at full selection every layer attends as if whole.

Random lives of a cache (prefill chunks, decode steps with and without a predicted fetch, crops,
reorders, forks) are played on the tiers and on plain tensors; outputs must agree at every step.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_config import RuntimeConfig
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.kernels.reference import attention_reference
from penstock.methods import FlexGen, Full, KVSwap, Quest, SelectionPolicy
from penstock.methods.louiskv.policy import LouisKV

MAX_TOKENS, MAX_BATCH, SCALING = 96, 4, 0.25
SHAPE = KVShape(num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
ALL = 10**6
SMALL: dict[str, Any] = {"window_tokens": 4, "sink_tokens": 4, "rank": 4}

SETTINGS: dict[str, tuple[SelectionPolicy, dict[str, Any]]] = {
    "kvswap": (KVSwap(**SMALL), {}),  # 4 tokens are 1024 bytes: two sectors, read directly
    "kvswap-staged": (KVSwap(group_tokens=3, **SMALL), {}),
    "kvswap-no-window": (KVSwap(window_tokens=0, sink_tokens=0, rank=4), {}),
    "kvswap-wide-sinks": (KVSwap(window_tokens=4, sink_tokens=11, rank=4), {}),
    "kvswap-shared": (KVSwap(reuse_tokens=0, selected_tokens=ALL, **SMALL), {}),
    "kvswap-shared-staged": (
        KVSwap(group_tokens=3, reuse_tokens=0, selected_tokens=ALL, **SMALL), {},
    ),
    "kvswap-selected": (KVSwap(attend="selected", selected_tokens=ALL, **SMALL), {}),
    "exact": (KVSwap(**SMALL), {"exact": True, "limit_bytes": 60_000}),
    "exact-staged": (KVSwap(group_tokens=3, **SMALL), {"exact": True, "limit_bytes": 60_000}),
    "flexgen": (FlexGen(group_tokens=8), {}),
    "full": (Full(), {}),
    "device-kvswap": (KVSwap(selected_tokens=ALL, **SMALL), {"device_tier": True}),
    "device-kvswap-wide-sinks": (
        KVSwap(window_tokens=4, sink_tokens=11, rank=4, selected_tokens=ALL),
        {"device_tier": True},
    ),
    "device-quest": (
        Quest(group_tokens=4, window_tokens=5, selected_tokens=ALL), {"device_tier": True},
    ),
    "device-louiskv": (
        LouisKV(window_tokens=5, sink_tokens=4, cluster_tokens=3, selected_tokens=ALL),
        {"device_tier": True},
    ),
    "device-louiskv-whole-layer": (
        LouisKV(
            window_tokens=5, sink_tokens=4, cluster_tokens=3, selected_tokens=ALL, full_layers=1
        ),
        {"device_tier": True},
    ),
    "device-quest-ahead": (
        Quest(group_tokens=4, window_tokens=5, selected_tokens=ALL, predict=True),
        {"device_tier": True},
    ),
    "device-louiskv-ahead": (
        LouisKV(
            window_tokens=5, sink_tokens=4, cluster_tokens=3, selected_tokens=ALL, predict=True
        ),
        {"device_tier": True},
    ),
    "device-exact": (KVSwap(**SMALL), {"device_tier": True, "exact": True}),
    "device-flexgen": (FlexGen(group_tokens=8), {"device_tier": True}),
}  # fmt: skip


def make_runtime(policy: SelectionPolicy, batch: int, **changes: Any) -> TieredRuntime:
    options: dict[str, Any] = {
        "shape": SHAPE, "policy": policy, "limit_bytes": None, "store": "memory",
        "max_tokens": MAX_TOKENS, "exact": False, "adapter": None, "device": torch.device("cpu"),
    }  # fmt: skip
    return TieredRuntime(RuntimeConfig(**{**options, **changes}), batch)


class Twins:
    """The tiers, and the same tokens in plain tensors."""

    def __init__(self, runtime: TieredRuntime, padding: list[int], seed: int) -> None:
        self.runtime = runtime
        self.random = torch.Generator().manual_seed(seed)
        self.padding = torch.tensor(padding)
        empty = torch.zeros(len(padding), SHAPE.num_kv_heads, 0, SHAPE.head_dim)
        self.kv = [(empty, empty) for _ in range(SHAPE.num_layers)]

    @property
    def length(self) -> int:
        return self.kv[0][0].shape[2]

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random)

    def step(self, count: int, predict: bool = False) -> None:
        batch, total = len(self.padding), self.length + count
        visible = torch.arange(total) >= self.padding[:, None]
        shown = None if bool(visible.all()) else visible
        causal = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        for layer in range(SHAPE.num_layers):
            following = layer + 1
            predict = predict and following < SHAPE.num_layers
            if predict and self.runtime.wants_query(following):
                self.runtime.begin_fetch(following, self.randn(batch, 4, SHAPE.head_dim))
            query = self.randn(batch, 4, count, SHAPE.head_dim)
            keys, values = (self.randn(batch, 2, count, SHAPE.head_dim) for _ in range(2))
            call = AttentionCall(query, keys, values, SCALING, visible=shown)
            actual = self.runtime.attend(layer, call).transpose(1, 2)
            old_keys, old_values = self.kv[layer]
            self.kv[layer] = (
                torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2),
            )  # fmt: skip
            mask = causal & visible[:, None, None]
            expected, _ = attention_reference(query, *self.kv[layer], scaling=SCALING, mask=mask)
            seen = visible[:, -count:, None].unsqueeze(1)  # what padding sees does not matter
            difference = (actual - expected).masked_fill(~seen, 0.0).abs().max().item()
            assert difference < 2e-5, (layer, count, total, difference)

    def crop(self, length: int) -> None:
        self.runtime.crop(length)
        self.kv = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self.kv]

    def select(self, rows: list[int]) -> None:
        self.runtime.select_rows(torch.tensor(rows))
        self.kv = [(keys[rows], values[rows]) for keys, values in self.kv]
        self.padding = self.padding[rows]

    def restart(self, padding: list[int], *, crop: bool) -> None:
        if not crop:
            self.runtime.reset()
        self.crop(0)
        self.padding = torch.tensor((padding * MAX_BATCH)[: len(self.padding)])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(2, 21)),
        st.tuples(st.just("decode"), st.integers(1, 9)),
        st.tuples(st.just("predicted"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(1, 30)),
        st.tuples(st.just("rows"), st.lists(st.integers(0, 7), min_size=1, max_size=MAX_BATCH)),
        st.tuples(
            st.sampled_from(["reset", "crop to nothing"]),
            st.lists(st.integers(0, 9), min_size=1, max_size=2),
        ),
    ),
    min_size=2,
    max_size=7,
)


def play(twins: Twins, first: int, steps: list[tuple[str, Any]]) -> None:
    twins.step(first)
    for kind, argument in steps:
        if kind == "prefill":
            if twins.length + argument <= MAX_TOKENS:
                twins.step(argument)
        elif kind in ("decode", "predicted"):
            for _ in range(min(argument, MAX_TOKENS - twins.length)):
                twins.step(1, predict=kind == "predicted")
        elif kind == "crop":
            # At least one visible token stays in every row.
            twins.crop(max(int(twins.padding.max()) + 1, twins.length - argument))
        elif kind == "rows":
            twins.select([i % len(twins.padding) for i in argument])
        else:
            twins.restart(argument, crop=kind == "crop to nothing")
            twins.step(max(argument) + 1)


@pytest.mark.parametrize("setting", SETTINGS)
@settings(deadline=None, max_examples=9, suppress_health_check=[HealthCheck.too_slow])
@given(
    padding=st.sampled_from([[0], [0, 0], [0, 5], [7, 2, 0], [0, 13]]),
    first=st.integers(14, 40),
    steps=STEPS,
    seed=st.integers(0, 9),
)
def test_random_lives(
    setting: str, padding: list[int], first: int, steps: list[tuple[str, Any]], seed: int
) -> None:
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, len(padding), **options)
    try:
        play(Twins(runtime, padding, seed), first, steps)
        report = runtime.report()
        assert report.used_bytes <= report.limit_bytes
    finally:
        runtime.close()


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_padding_does_not_outlive_its_prompt(setting: str, crop: bool) -> None:
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, 2, **options)
    twins = Twins(runtime, [0, 25], 0)
    play(twins, 40, [("decode", 3)])
    twins.restart([0], crop=crop)
    play(twins, 40, [("decode", 12)])
    runtime.close()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_long_answer_to_a_short_prompt(setting: str) -> None:
    """Sinks and units come from decoding alone."""
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, 1, **options)
    play(Twins(runtime, [0], 0), 2, [("decode", 15), ("predicted", 30)])
    runtime.close()
