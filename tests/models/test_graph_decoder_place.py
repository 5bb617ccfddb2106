"""A model's `forward` asks the cache of a call, and comes back with the last cache.

On a CPU nothing is recorded: a stand-in counts the steps that a GPU would record or replay.
"""

from typing import Any

import pytest
import torch

from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.request import Request
from penstock.methods import Quest
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.graph_decoder import WARM_UP_STEPS, GraphDecoder
from penstock.testing.tiny_models import tiny_model

POLICY = Quest(selected_tokens=16, window_tokens=8, sink_tokens=4, group_tokens=8)
IDS = torch.arange(3, 40)[None]
NEW = 12
RECORDED = NEW - 1 - WARM_UP_STEPS
"""Steps of an answer behind its first token, which is the prompt's; the device tier settles in none
of them."""
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The position of each step that would be recorded; caches are as on a GPU."""
    attach, found = TieredCache._attach, list[int]()

    def as_on_a_gpu(self: TieredCache, model: Any, shape: Any, *, record: bool) -> None:
        assert not record
        attach(self, model, shape, record=True)

    def record(_: GraphDecoder, __: object, ids: torch.Tensor, positions: torch.Tensor) -> bool:
        assert ids.shape == positions.shape == (1, 1)
        found.append(int(positions))
        return False

    monkeypatch.setattr(TieredCache, "_attach", as_on_a_gpu)
    monkeypatch.setattr(GraphDecoder, "_record", record)
    return found


def cache_of(model: Any) -> TieredCache:
    return TieredCache(model, POLICY, store="host", max_tokens=80)


@torch.no_grad()
@pytest.mark.parametrize("named", [True, False])
def test_ids_need_no_name(recorded: list[int], named: bool) -> None:
    model: Any = tiny_model("llama")
    with cache_of(model) as cache:
        given = cache_argument(model, cache)
        for at in range(6):
            ids = IDS if at == 0 else IDS[:, at : at + 1]
            args, kwargs = ((), {"input_ids": ids}) if named else ((ids,), {})
            model(*args, **kwargs, **given, use_cache=True)
    assert recorded == list(range(IDS.shape[1] + WARM_UP_STEPS, IDS.shape[1] + 5))
    with pytest.raises(TypeError, match="input_ids"):
        model(IDS, input_ids=IDS)


def test_an_answer_of_an_llm_and_of_an_engine_is_recorded(recorded: list[int]) -> None:
    steps = list(range(IDS.shape[1] + WARM_UP_STEPS, IDS.shape[1] + NEW - 1))
    assert len(steps) == RECORDED
    model: Any = tiny_model("llama")
    llm = LLM(model, policy=POLICY, store="host", adapter="none")
    [[answer]] = [each.outputs for each in llm.generate([IDS[0].tolist()], PARAMS)]
    assert recorded == steps
    recorded.clear()
    requests = [Request(prompt=IDS[0].tolist(), sampling=PARAMS) for _ in range(2)]
    with Engine(llm, memory=None) as engine:  # one after the other: what runs together joins
        both = [engine.submit(each).result().outputs[0].token_ids for each in requests]
    assert sorted(recorded) == sorted([*steps, *steps])
    assert both == [answer.token_ids] * 2
    assert "forward" not in model.__dict__


@torch.no_grad()
def test_one_of_two_caches_may_go_first(recorded: list[int]) -> None:
    model: Any = tiny_model("llama")
    first, second = cache_of(model), cache_of(model)
    for at in range(WARM_UP_STEPS + 3):
        ids = IDS if at == 0 else IDS[:, at : at + 1]
        for cache in (first, second):
            if cache is second or at <= WARM_UP_STEPS:
                model(input_ids=ids, **cache_argument(model, cache), use_cache=True)
        if at == WARM_UP_STEPS:
            first.close()
    assert recorded == [IDS.shape[1] + WARM_UP_STEPS, IDS.shape[1] + WARM_UP_STEPS + 1]
    second.close()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("count", [1, 2])
def test_a_models_own_forward_comes_back(recorded: list[int], count: int) -> None:
    model: Any = tiny_model("llama")
    called, plain = list[int](), model.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(len(args))
        return plain(*args, **kwargs)

    model.forward = own
    caches = [cache_of(model) for _ in range(count)]
    called.clear()
    for cache in caches:
        assert model.forward is not own
        model(IDS)
        cache.close()
        cache.close()
    assert called == [1] * count
    assert model.forward is own


def test_what_stands_before_it_by_now_stays(recorded: list[int]) -> None:
    model: Any = tiny_model("llama")
    with cache_of(model):
        ours = model.forward
        model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
        theirs = model.forward
    assert model.forward is theirs
    assert model(IDS).logits.shape[:2] == IDS.shape
