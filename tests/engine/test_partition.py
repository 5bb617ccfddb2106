"""Units, sinks and window partition the past: at full selection every layer attends as if whole.

Random lives of a cache (prefill chunks, decode steps with and without a predicted fetch, crops,
reorders, forks) are played on the tiers and on plain tensors; outputs must agree at every step.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.shape import KVShape
from penstock.engine.resident_layer import ResidentLayer
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import FlexGen, Full, KVSwap, Quest, SelectionPolicy
from penstock.methods.louiskv.policy import LouisKV
from penstock.testing import mirrored_runtime
from penstock.testing.mirrored_runtime import MirroredRuntime

MAX_TOKENS, MAX_BATCH = 96, 4
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
    options: dict[str, Any] = {"shape": SHAPE, "max_tokens": MAX_TOKENS, "must_tier": True}
    return mirrored_runtime.make_runtime(policy, batch, **{**options, **changes})


def restart(mirrored: MirroredRuntime, padding: list[int], *, crop: bool) -> None:
    if not crop:
        mirrored.runtime.reset()
    mirrored.crop(0)
    mirrored.padding = torch.tensor((padding * MAX_BATCH)[: len(mirrored.padding)])


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


def play(mirrored: MirroredRuntime, first: int, steps: list[tuple[str, Any]]) -> None:
    mirrored.step(first)
    for kind, argument in steps:
        if kind == "prefill":
            if mirrored.length + argument <= MAX_TOKENS:
                mirrored.step(argument)
        elif kind in ("decode", "predicted"):
            for _ in range(min(argument, MAX_TOKENS - mirrored.length)):
                mirrored.step(1, predict=kind == "predicted")
        elif kind == "crop":
            # At least one visible token stays in every row.
            mirrored.crop(max(int(mirrored.padding.max()) + 1, mirrored.length - argument))
        elif kind == "rows":
            mirrored.select_rows([i % len(mirrored.padding) for i in argument])
        else:
            restart(mirrored, argument, crop=kind == "crop to nothing")
            mirrored.step(max(argument) + 1)


@pytest.mark.parametrize("setting", SETTINGS)
@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow])
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
        play(MirroredRuntime(runtime, padding, seed), first, steps)
        report = runtime.report()
        assert report.used_bytes <= report.limit_bytes
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("setting", "crop"), [(name, number % 2 == 1) for number, name in enumerate(SETTINGS)]
)
def test_padding_does_not_outlive_its_prompt(setting: str, crop: bool) -> None:
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, 2, **options)
    mirrored = MirroredRuntime(runtime, [0, 25], 0)
    play(mirrored, 40, [("decode", 3)])
    restart(mirrored, [0], crop=crop)
    play(mirrored, 40, [("decode", 6)])
    runtime.close()


@pytest.mark.parametrize(
    "setting",
    [
        "kvswap", "kvswap-staged", "kvswap-wide-sinks", "kvswap-shared-staged", "exact", "full",
        "device-kvswap-wide-sinks", "device-louiskv-whole-layer", "device-quest-ahead",
        "device-exact",
    ],
)  # fmt: skip
def test_a_long_answer_to_a_short_prompt(setting: str) -> None:
    """Sinks and units come from decoding alone."""
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, 1, **options)
    play(MirroredRuntime(runtime, [0], 0), 2, [("decode", 9), ("predicted", 24)])
    runtime.close()


@pytest.mark.parametrize(
    "setting",
    [
        "kvswap", "kvswap-staged", "kvswap-no-window", "kvswap-shared", "exact-staged",
        "device-kvswap", "device-louiskv-ahead",
    ],
)  # fmt: skip
def test_an_answer_after_a_crop(setting: str) -> None:
    """What slots and window held of the tokens cut off is not what stands there later."""
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, 2, **options)
    mirrored = MirroredRuntime(runtime, [0, 5], 0)
    play(mirrored, 25, [("decode", 2), ("crop", 14), ("predicted", 13), ("crop", 6), ("decode", 9)])
    assert not any(isinstance(layer, ResidentLayer) for layer in runtime.layers)
    runtime.close()
