"""What a cache on a GPU launches is launched there, whichever GPU is current; with stand-ins."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import TieredCache
from penstock.core.on_device import on_device
from penstock.core.shape import KVShape
from penstock.engine import cache_health
from penstock.engine.attention_call import AttentionCall
from penstock.engine.beams.decoding import StepRequest
from penstock.engine.cache_health import CacheHealth
from penstock.engine.device_tier import device_steps
from penstock.engine.device_tier.device_steps import DeviceSteps
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import Quest
from penstock.models import attention_adapter, beam_decoder, graph_decoder
from penstock.models.beam_decoder import make_decoder
from penstock.models.cache_argument import cache_argument
from penstock.models.graph_decoder import GraphDecoder
from penstock.search.draws import make_choose
from penstock.testing.tiny_models import tiny_model

CPU = torch.device("cpu")
SECOND = torch.device("cuda:1")
SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
POLICY = Quest(selected_tokens=16, window_tokens=8, sink_tokens=4, group_tokens=8)


class Seen:
    """Stands in for on_device(): which devices were asked for, and which are entered now."""

    def __init__(self) -> None:
        self.asked: list[torch.device] = []
        self.now: list[torch.device] = []

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        self.asked.append(device)
        self.now.append(device)
        try:
            yield
        finally:
            self.now.pop()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made = Seen()
    for module in (attention_adapter, beam_decoder, cache_health, device_steps, graph_decoder):
        monkeypatch.setattr(module, "on_device", made)
    return made


def test_a_gpu_is_made_current_and_a_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = Seen()
    monkeypatch.setattr(torch.cuda, "device", entered)
    with on_device(SECOND):
        assert entered.now == [SECOND]
    with on_device(CPU), on_device(CPU):
        assert not entered.now
    assert entered.asked == [SECOND]


def test_a_step_that_fails_gives_the_gpu_back(seen: Seen) -> None:
    forgotten: list[list[torch.device]] = []
    health = CacheHealth(SECOND, lambda: forgotten.append([*seen.now]))

    def fail() -> None:
        with health, health:
            assert seen.now == [SECOND, SECOND]
            raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        fail()
    assert not seen.now
    assert health.is_torn
    assert [SECOND] in forgotten, "slots are dropped on the device as well"


def test_attention_and_what_changes_a_cache(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[torch.device]] = []
    plain = TieredRuntime.attend

    def attend(self: TieredRuntime, layer: int, call: AttentionCall) -> Tensor:
        launched.append([*seen.now])
        return plain(self, layer, call)

    monkeypatch.setattr(TieredRuntime, "attend", attend)
    model = tiny_model("llama")
    with TieredCache(model, POLICY, store="memory", max_tokens=80) as cache:
        model.generate(
            torch.arange(3, 43)[None], **cache_argument(model, cache), max_new_tokens=4,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        attended, so_far = len(launched), len(seen.asked)
        assert attended >= 4 * model.config.num_hidden_layers
        assert all(now == [CPU] for now in launched)
        assert so_far > attended, "the runtime's own steps too"
        cache.crop(30)
        assert len(seen.asked) > so_far
    assert not seen.now


def test_the_step_of_the_device_tier(seen: Seen) -> None:
    config = RuntimeSettings(
        shape=SHAPE, policy=POLICY, limit_bytes=None, store="memory", max_tokens=80, exact=False,
        adapter=None, device=CPU, device_tier=True,
    )  # fmt: skip
    runtime = TieredRuntime(config, 1)
    steps = DeviceSteps(runtime.plan, CPU)
    steps.begin(7)
    steps.begin(7)
    assert seen.asked == [CPU]
    assert not seen.now
    runtime.close()


def test_a_step_that_may_be_recorded(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    now: list[list[torch.device]] = []
    monkeypatch.setattr(GraphDecoder, "_step", lambda *_: now.append([*seen.now]))
    with TieredCache(model, POLICY, store="memory", max_tokens=80) as cache:
        assert cache.tiers is not None
        cache.graph_decoder = GraphDecoder(model, weakref.ref(cache), cache.tiers)
        model(torch.arange(3, 10)[None], **cache_argument(model, cache))
    assert now == [[CPU]]


def test_a_search(seen: Seen) -> None:
    model = tiny_model("llama")
    decoder = make_decoder(
        model, store="memory", beams=4, width=2, max_tokens=60, memory="1/1", block_tokens=8
    )
    inside: list[list[torch.device]] = []
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inside.append([*seen.now])
        return plain(*args, **kwargs)

    model.forward = forward
    beam = decoder.prefill([*range(3, 30)])
    beams = decoder.fork(beam, 2)
    uniforms = torch.rand(2, 2, dtype=torch.float64)
    request = StepRequest(num_tokens=2, uniforms=uniforms, choose=make_choose())
    decoder.run_step(beams, request)
    decoder.close()
    assert inside
    assert all(CPU in now for now in inside)
    assert not seen.now
