"""What a layer says it attended to is what its output is made of."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.kernels.plain_attention import attention_twin
from penstock.methods import POLICIES, SelectionPolicy

SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
SCALING = 0.25
PROMPT_TOKENS, STEPS = 150, 8
PADDING = (0, 21)
REBUILDS_KEYS = "shadowkv"  # attends to approximations of the keys it selects

Setting = tuple[str, dict[str, Any]]
DEVICE_TIER: dict[str, Setting] = {
    f"device-{name}": (name, {"reuse_tokens": 64})
    for name, policy in POLICIES.items() if policy.device_tier and policy.retrieves
}  # fmt: skip
SETTINGS: dict[str, Setting] = DEVICE_TIER | {
    name: (name, {}) for name, policy in POLICIES.items() if policy.retrieves
} | {
    "kvswap": ("kvswap", {"reuse_tokens": 32}),
    "kvswap-selected": ("kvswap", {"attend": "selected", "reuse_tokens": 64}),
    "kvswap-no-reuse": ("kvswap", {"reuse_tokens": 0, "slot_bits": 16}),
    "kvswap-8-bits": ("kvswap", {"reuse_tokens": 32, "slot_bits": 8}),
    "kvswap-some-shared": ("kvswap", {"reuse_tokens": 32, "slot_bits": 8, "shared_every": 2}),
    "kvswap-groups-of-8": ("kvswap", {"group_tokens": 8, "reuse_tokens": 64}),
    "quest-no-reuse": ("quest", {"reuse_tokens": 0}),
}  # fmt: skip


def make(name: str, **wanted: Any) -> SelectionPolicy:
    """A policy with the options that it knows."""
    known = {field.name for field in fields(POLICIES[name])}
    return POLICIES[name](**{key: value for key, value in wanted.items() if key in known})


class Watched:
    """A runtime fed with random tokens, twins of its keys and values, and what it tells."""

    def __init__(self, policy: SelectionPolicy, *, device_tier: bool = False) -> None:
        config = RuntimeSettings(
            shape=SHAPE, policy=policy, limit_bytes=None, store="memory", max_tokens=200,
            exact=False, adapter=None, device=torch.device("cpu"), device_tier=device_tier,
        )  # fmt: skip
        self.runtime = TieredRuntime(config, len(PADDING))
        self.random = torch.Generator().manual_seed(0)
        self.kv = [torch.zeros(2, len(PADDING), 2, 0, SHAPE.head_dim)] * SHAPE.num_layers
        self.seen: dict[int, Tensor] = {}

    def step(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """The query and the output of each layer, both [batch, heads, tokens, head_dim]."""
        total = self.kv[0].shape[3] + count
        visible = torch.ones(len(PADDING), total, dtype=torch.bool)
        for row, padding in enumerate(PADDING):
            visible[row, :padding] = False
        out = []
        for layer in range(SHAPE.num_layers):
            query = 2 * torch.randn(len(PADDING), 4, count, SHAPE.head_dim, generator=self.random)
            new = torch.randn(2, len(PADDING), 2, count, SHAPE.head_dim, generator=self.random)
            self.kv[layer] = torch.cat([self.kv[layer], new], dim=3)
            call = AttentionCall(query, new[0], new[1], SCALING, visible=visible)
            out.append((query, self.runtime.attend(layer, call).transpose(1, 2)))
        return out

    def observe(self) -> list[RetrievalLayer | DeviceLayer]:
        kinds = RetrievalLayer | DeviceLayer
        layers = [x for x in self.runtime.layers if isinstance(x, kinds)]
        for layer in layers:
            layer.observer = self.seen.__setitem__
        return layers


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_output_is_attention_over_what_was_told(setting: str) -> None:
    name, options = SETTINGS[setting]
    on_device = setting.startswith("device-")
    if on_device and name == "louiskv":
        options = {}
    policy = make(name, **{"selected_tokens": 24, "window_tokens": 8, "sink_tokens": 4, **options})
    watched = Watched(policy, device_tier=on_device)
    try:
        watched.step(PROMPT_TOKENS)
        layers = watched.observe()
        assert len(layers) == SHAPE.num_layers
        for _ in range(STEPS):
            for layer, (query, actual) in enumerate(watched.step(1)):
                keys, values = watched.kv[layer]
                attended = watched.seen[layer].view(len(PADDING), -1, keys.shape[2])
                assert not attended[1, :, : PADDING[1]].any()
                assert attended[:, :, -1].all(), "the new token sees itself"
                for row, padding in enumerate(PADDING):
                    assert attended[row].sum(dim=1).max() < keys.shape[2] - padding, "a selection"
                assert attended.shape[1] == (2 if policy.per_head else 1)
                mask = attended.repeat_interleave(4 // attended.shape[1], dim=1)[:, :, None]
                expected, _ = attention_twin(query, keys, values, scaling=SCALING, mask=mask)
                if name != REBUILDS_KEYS:
                    most = 3e-2 if options.get("slot_bits") == 8 else 2e-5
                    assert (actual - expected).abs().max().item() < most
        assert [layer.setup.plan.compact for layer in layers] == [
            options.get("attend") == "selected"
        ] * len(layers)
    finally:
        watched.runtime.close()


def test_the_oracle_has_teeth() -> None:
    """One token more or less in the mask changes the output by more than the tolerance."""
    watched = Watched(make("quest", selected_tokens=24, window_tokens=8))
    try:
        watched.step(PROMPT_TOKENS)
        watched.observe()
        query, actual = watched.step(1)[0]
        keys, values = watched.kv[0]
        attended = watched.seen[0].view(len(PADDING), 2, -1)
        for head in range(2):
            wrong = attended.clone()
            logits = (query[0, 2 * head : 2 * head + 2, 0] @ keys[0, head].T).sum(dim=0)
            wrong[0, head, int(logits.masked_fill(attended[0, head], -1e9).argmax())] = True
            mask = wrong.repeat_interleave(2, dim=1)[:, :, None]
            expected, _ = attention_twin(query, keys, values, scaling=SCALING, mask=mask)
            assert (actual - expected).abs().max().item() > 1e-3
    finally:
        watched.runtime.close()
