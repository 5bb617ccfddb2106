"""Values that are not as wide as their keys, or lie in them: every policy attends as if whole."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from penstock.core.shape import KVShape
from penstock.methods import POLICIES, KVSwap, SelectionPolicy
from penstock.testing.mirrored_runtime import MirroredRuntime, make_runtime

APART = KVShape(
    num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=24, value_dim=16, dtype=torch.float32
)
WIDE_VALUES = replace(APART, head_dim=16, value_dim=24)
INSIDE = replace(APART, num_kv_heads=1, values_in_keys=True)
SHAPES = {"apart": APART, "wide values": WIDE_VALUES, "inside": INSIDE}
WIDE = {
    "selected_tokens": 10**6, "window_tokens": 8, "sink_tokens": 4, "heavy_tokens": 10**6,
    "num_outliers": 0,
}  # fmt: skip


def everything(name: str) -> SelectionPolicy:
    plain = POLICIES[name]()
    known = {field.name for field in fields(plain)}
    wanted = WIDE | {"group_tokens": min(8, getattr(plain, "group_tokens", 8))}
    return replace(plain, **{field: wanted[field] for field in known & wanted.keys()})


def live(runtime: Any) -> None:
    """A prompt with padding, steps, another turn, a crop, other rows."""
    mirrored = MirroredRuntime(runtime, [0, 5])
    mirrored.step(41)
    mirrored.decode(2, predict=True)
    if not runtime.policy.drops:
        mirrored.step(9)
        mirrored.crop(37)
        mirrored.decode(2)
        mirrored.select_rows([1, 0])
    mirrored.decode(2)


@pytest.mark.parametrize("shape", ["apart", "inside"])
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "hillinfer"])
def test_every_policy_attends_to_all(name: str, shape: str) -> None:
    runtime = make_runtime(
        everything(name), 2, shape=SHAPES[shape], max_tokens=80, scaling=0.25, must_tier=True
    )
    try:
        live(runtime)
    finally:
        runtime.close()


SETTINGS: dict[str, tuple[KVSwap, dict[str, Any]]] = {
    "exact": (KVSwap(), {"exact": True, "limit_bytes": 110_000}),
    "gathered": (KVSwap(attend="selected", selected_tokens=10**6, rank=8), {}),
    "staged": (KVSwap(group_tokens=3, selected_tokens=10**6, rank=8), {}),
    "shared": (KVSwap(reuse_tokens=0, selected_tokens=10**6, rank=8), {}),
    "tail": (KVSwap(tail="mean", selected_tokens=10**6, rank=8), {}),
    "mass": (KVSwap(mass=0.999, floor=0.9999, below="exact", selected_tokens=10**6, rank=8), {}),
}


@pytest.mark.parametrize(
    ("setting", "shape"),
    [
        (setting, shape)
        for number, setting in enumerate(SETTINGS)
        for place, shape in enumerate(SHAPES)
        if (number + place) % 3
    ],
)
def test_other_ways_of_kvswap(setting: str, shape: str) -> None:
    policy, options = SETTINGS[setting]
    runtime = make_runtime(policy, 2, shape=SHAPES[shape], max_tokens=80, **options)
    try:
        live(runtime)
    finally:
        runtime.close()


def test_tokens_take_no_more_than_their_numbers() -> None:
    assert APART.token_bytes == 4 * 2 * (24 + 16)
    assert INSIDE.token_bytes == 4 * 24
    tokens = torch.randn(3, *APART.token_size)
    keys, values = APART.keys_of(tokens), APART.values_of(tokens)
    assert (keys.shape, values.shape) == ((3, 2, 24), (3, 2, 16))
    assert torch.equal(APART.tokens_of(keys, values), tokens)
    latents = torch.randn(3, *INSIDE.token_size)
    assert torch.equal(INSIDE.values_of(latents)[:, 0], latents[:, :16])
    assert (APART.padding_bytes(3), INSIDE.padding_bytes(3)) == (3 * 2 * 24 * 4, 0)
    even = replace(APART, value_dim=24)
    assert even.token_size == (2, 2, 24)
