"""The device tier one layer ahead: the same as at the layer, given the same queries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier import device_layer, device_steps
from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import Quest, SelectionPolicy
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.louiskv.policy import LouisKV

SHAPE = KVShape(num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT_TOKENS, STEPS, MAX_TOKENS = 90, 16, 140
BUDGET: dict[str, Any] = {
    "selected_tokens": 24, "window_tokens": 8, "sink_tokens": 4, "predict": True,
}  # fmt: skip
POLICIES: dict[str, SelectionPolicy] = {
    "quest": Quest(group_tokens=8, **BUDGET),
    "arkvale": ArkVale(group_tokens=4, reuse_tokens=40, **BUDGET),
    "louiskv": LouisKV(tau=0.5, cluster_tokens=8, block_tokens=PROMPT_TOKENS, **BUDGET),
    "louiskv-spread": LouisKV(tau=0.5, cluster_tokens=8, summary="mean+spread", **BUDGET),
    "louiskv-segments": LouisKV(boundaries="stride:1", cluster_tokens=16, **BUDGET),
}


def make_runtime(policy: SelectionPolicy, **changes: Any) -> TieredRuntime:
    options: dict[str, Any] = {
        "shape": SHAPE, "policy": policy, "limit_bytes": None, "store": "memory",
        "max_tokens": MAX_TOKENS, "exact": False, "adapter": None, "device": DEVICE,
        "device_tier": True,
    }  # fmt: skip
    return TieredRuntime(RuntimeSettings(**{**options, **changes}), 2)


class Feed:
    """The same tokens for a runtime that looks ahead and one that does not."""

    def __init__(self, ahead: TieredRuntime, plain: TieredRuntime) -> None:
        self.ahead, self.plain = ahead, plain
        self.padding, self.length = torch.tensor((0, 13)), 0
        self.random = torch.Generator().manual_seed(3)
        self.queries = self._draw(SHAPE.num_layers, 2, 4, 1)

    def _draw(self, *size: int) -> Tensor:
        return torch.randn(*size, SHAPE.head_dim, generator=self.random).to(DEVICE)

    def begin(self, layer: int) -> None:
        """What the hook before `layer` - 1 does, with a prediction that is true."""
        steps = self.ahead.device_steps
        assert steps is not None
        if layer < SHAPE.num_layers and self.ahead.wants_query(layer):
            with steps.choosing(self.ahead.layer_length(layer)):
                self.ahead.begin_fetch(layer, 3 * self.queries[layer][:, :, 0])

    def step(self, count: int = 1, between: Callable[[int], None] = lambda layer: None) -> None:
        """All layers of one forward pass; both must say the same."""
        self.length += count
        visible = (torch.arange(self.length) >= self.padding[:, None]).to(DEVICE)
        self.queries = 0.7 * self.queries + 0.7 * self._draw(SHAPE.num_layers, 2, 4, 1)
        for layer in range(SHAPE.num_layers):
            query = self.queries[layer] if count == 1 else self._draw(2, 4, count)
            keys, values = self._draw(2, 2, count), self._draw(2, 2, count)
            if count == 1:
                self.begin(layer + 1)
                between(layer)
            call = AttentionCall(3 * query, keys, values, 0.25, visible=visible)
            mine, other = self.ahead.attend(layer, call), self.plain.attend(layer, call)
            assert torch.equal(mine, other), (self.length, layer)


@pytest.fixture(params=["quest", "louiskv", "louiskv-segments"])
def feed(request: pytest.FixtureRequest) -> Any:
    runtimes = [make_runtime(POLICIES[request.param]) for _ in range(2)]
    fed = Feed(*runtimes)
    fed.step(PROMPT_TOKENS)
    yield fed
    for runtime in runtimes:
        runtime.close()


def layer_of(runtime: TieredRuntime, number: int) -> DeviceLayer:
    layer = runtime.layers[number]
    assert isinstance(layer, DeviceLayer)
    return layer


@pytest.mark.parametrize(
    ("feed", "staying"),
    [
        ("quest", False), ("quest", True), ("arkvale", True), ("louiskv", False), ("louiskv", True),
        ("louiskv-spread", False), ("louiskv-segments", True),
    ],
    indirect=["feed"],
)  # fmt: skip
def test_true_predictions_change_nothing(
    feed: Feed, staying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tidyings of the units, which come before the first layer that is begun."""
    monkeypatch.setattr(device_layer, "STAYING_GATHER", staying)
    monkeypatch.setattr(device_steps, "SETTLE_STEPS", 8)
    for _ in range(STEPS):
        feed.step()
    for number in range(SHAPE.num_layers):
        mine, other = layer_of(feed.ahead, number), layer_of(feed.plain, number)
        assert not mine.fetch_begun
        assert torch.equal(mine.unit_in, other.unit_in)
        assert torch.equal(mine.lists.traffic, other.lists.traffic)
        assert mine.lists.traffic[:, 1].sum() > 0
    clocks = []
    for runtime in (feed.ahead, feed.plain):
        assert runtime.device_steps is not None
        clocks.append(runtime.device_steps.clock)
    assert clocks[0].position.item() == clocks[1].position.item() == feed.length
    assert clocks[0].end_unit.item() == clocks[1].end_unit.item()


def test_layers_are_begun_once_and_ahead(feed: Feed) -> None:
    begun: list[list[bool]] = []

    def look(layer: int) -> None:
        begun.append([layer_of(feed.ahead, n).fetch_begun for n in range(SHAPE.num_layers)])
        assert not feed.ahead.wants_query(layer + 1) if layer + 1 < SHAPE.num_layers else True

    feed.step(between=look)
    assert begun == [
        [n > 0 and n in (layer, layer + 1) for n in range(SHAPE.num_layers)]
        for layer in range(SHAPE.num_layers)
    ]


def test_another_prompt_a_crop_and_a_row_change(feed: Feed) -> None:
    for _ in range(3):
        feed.step()
    feed.step(30)
    for _ in range(3):
        feed.step()
    for runtime in (feed.ahead, feed.plain):
        runtime.crop(feed.length - 3)
    feed.length -= 3
    for _ in range(3):
        feed.step()
    for runtime in (feed.ahead, feed.plain):
        runtime.select_rows(torch.tensor([1, 0]))
    feed.padding = feed.padding.flip(0)
    for _ in range(3):
        feed.step()


def test_what_was_begun_for_a_step_that_never_came_is_forgotten(feed: Feed) -> None:
    feed.step()
    feed.queries = feed.queries.flip(1)
    feed.begin(1)
    for runtime in (feed.ahead, feed.plain):
        runtime.crop(feed.length - 1)
    feed.length -= 1
    assert not layer_of(feed.ahead, 1).fetch_begun
    # Queries to compare with are not among what is cropped: both look anew.
    for _ in range(5):
        feed.step()


def test_a_step_that_fails_halfway(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    feed.step()
    feed.begin(1)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceLayer, "_step", lambda *_: 1 / 0)
        query, keys, values = (torch.ones(2, n, 1, 16, device=DEVICE) for n in (4, 2, 2))
        call = AttentionCall(query, keys, values, 0.25)
        for runtime in (feed.ahead, feed.plain):
            with pytest.raises(ZeroDivisionError):
                runtime.attend(0, call)
            with pytest.raises(CacheStateError, match="failed halfway"):
                runtime.attend(0, call)
            runtime.crop(feed.length - 1)
    feed.length -= 1
    assert not layer_of(feed.ahead, 1).fetch_begun
    for _ in range(3):
        feed.step()


def test_a_recording_that_failed_begins_its_step_again() -> None:
    runtimes = [make_runtime(POLICIES["louiskv"]) for _ in range(2)]
    feed = Feed(*runtimes)
    feed.step(PROMPT_TOKENS)
    feed.step()
    steps = feed.ahead.device_steps
    assert steps is not None
    ticked: list[int] = []
    tick = steps.clock.tick

    def counted() -> None:
        ticked.append(1)
        tick()

    vars(steps.clock)["tick"] = counted
    steps.begin(feed.length)
    steps.begin(feed.length)
    assert len(ticked) == 1, "once a step"
    layer_of(feed.ahead, 2)._begun = feed.queries[2]
    steps.forget_recording()
    assert not layer_of(feed.ahead, 2).fetch_begun
    feed.step()
    assert len(ticked) == 2
