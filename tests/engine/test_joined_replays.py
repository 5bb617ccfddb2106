"""Joined steps of the device tier, recorded: the tokens of caches that are stepped alone.

On a CPU nothing is recorded: a stand-in runs a part again where a GPU would replay it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from penstock import KVSwap, TieredCache
from penstock.engine.device_tier import device_steps, joined_replays
from penstock.engine.joined_runtime import JoinedRuntime
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.generation.serving.steps import Steps, next_logits
from penstock.methods import Quest, SelectionPolicy
from penstock.methods.baselines.arkvale import ArkVale
from penstock.models import joined_cache
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

BUDGET: dict[str, Any] = {"selected_tokens": 32, "window_tokens": 8, "sink_tokens": 4}
POLICIES: dict[str, SelectionPolicy] = {
    "kvswap": KVSwap(**BUDGET),
    "quest": Quest(group_tokens=8, **BUDGET),
    "arkvale-ahead": ArkVale(group_tokens=8, predict=True, **BUDGET),
}
LENGTHS = [70, 33, 101]
STEPS, SETTLE_STEPS = 18, 12
"""An index tidies up within the steps of each, where nothing is recorded."""


class Repeated:
    """A recording that runs its function at every replay."""

    made: list["Repeated"]
    refuses = False

    def __init__(self, run: Callable[[], Any], _: object) -> None:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._run, self.out, self.replays = run, None, 0
        self.made.append(self)

    def replay(self) -> None:
        self.out = self._run()
        self.replays += 1


class Stub:
    """A stream or an event of a device that there is not."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    wait_event = record


@pytest.fixture(autouse=True)
def settles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device_steps, joined_replays):
        monkeypatch.setattr(module, "SETTLE_STEPS", SETTLE_STEPS)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Repeated]:
    """Recordings; caches are as on a GPU."""
    Repeated.made = []
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stub)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(joined_replays, "Recording", Repeated)
    monkeypatch.setattr(TieredRuntime, "replayed", lambda _: None)  # what runs again counts itself

    class AsOnAGpu(JoinedRuntime):
        def __init__(self, like: Any, *, records: bool) -> None:
            super().__init__(like, records=records)
            self._replays = joined_replays.JoinedReplays(self.settings.device)

    monkeypatch.setattr(joined_cache, "JoinedRuntime", AsOnAGpu)
    return Repeated.made


@torch.no_grad()
def decoded(model: Any, policy: SelectionPolicy, step: Callable[..., list[Any]]) -> list[Any]:
    """Logits of every step of three caches, of which each joins, and leaves, at another one.

    Args:
        step: takes caches and a token for each of their rows.
    """
    draw = torch.Generator().manual_seed(5)
    caches, told = [], list[Any]()
    for rows, length in enumerate(LENGTHS, start=1):
        cache = TieredCache(
            model, policy, store="host", max_tokens=200, batch_size=1 + rows % 2, adapter="none"
        )
        ids = torch.randint(3, VOCABULARY, (1 + rows % 2, length), generator=draw)
        model(ids.to(model.device), **cache_argument(model, cache), use_cache=True)
        caches.append(cache)
    for at in range(STEPS):
        there = [each for number, each in enumerate(caches) if 2 * number <= at < STEPS - number]
        tokens = [[3 + (7 * at + row) % 90 for row in range(each.tiers.batch)] for each in there]
        told += step(there, tokens)
    for cache in caches:
        cache.close()
    return told


def compare(name: str, model: Any, made: list[Any]) -> None:
    """Joined steps beside steps alone, and what was recorded for them."""

    def alone(caches: list[TieredCache], tokens: list[list[int]]) -> list[torch.Tensor]:
        return [next_logits(model, *each) for each in zip(caches, tokens, strict=True)]

    steps = Steps(model)
    expected, found = decoded(model, POLICIES[name], alone), decoded(model, POLICIES[name], steps)
    [joined] = steps._joined.values()
    passes = joined._segments.values()
    assert [each.is_recorded for each in passes] == [model.device.type == "cuda"] * len(passes)
    steps.close()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert steps.joint > STEPS / 2
    layers = model.config.num_hidden_layers
    ahead = layers - 1 if "ahead" in name else 0
    assert len(made) == len(LENGTHS) * (layers + ahead)
    assert min(each.replays for each in made) > STEPS - 3 * len(LENGTHS) - 3


@pytest.mark.parametrize("name", ["kvswap", "arkvale-ahead"])
def test_replays_say_what_caches_say_alone(name: str, made: list[Repeated]) -> None:
    compare(name, tiny_model("llama").eval(), made)


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES)
def test_graphs_say_what_caches_say_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    class Counted(joined_replays.Recording):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.replays = 0
            made.append(self)

        def replay(self) -> None:
            super().replay()
            self.replays += 1

    monkeypatch.setattr(joined_replays, "Recording", Counted)
    compare(name, tiny_model("llama").cuda().eval(), made)


def test_what_cannot_be_recorded_is_launched(
    made: list[Repeated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Repeated, "refuses", True)
    test_launched_steps_say_what_caches_say_alone(made)


def test_launched_steps_say_what_caches_say_alone(made: list[Repeated]) -> None:
    model: Any = tiny_model("llama").eval()
    given = [torch.arange(3, 60)[None], torch.arange(20, 70)[None]]
    told = []
    for joins in (False, True):
        steps, found = Steps(model), list[Any]()
        caches = [TieredCache(model, KVSwap(**BUDGET), store="host", max_tokens=80) for _ in given]
        with torch.no_grad():
            for cache, ids in zip(caches, given, strict=True):
                model(ids, **cache_argument(model, cache), use_cache=True)
            for at in range(6):
                tokens = [[at + 5], [at + 9]]
                for part in [slice(2)] if joins else [slice(1), slice(1, 2)]:
                    found += steps(caches[part], tokens[part])
        assert [each.get_seq_length() for each in caches] == [63, 56]
        assert [each.stats.decode.tokens for each in caches] == [6, 6]
        for cache in caches:
            cache.close()
        steps.close()
        told.append(found)
    for one, other in zip(*told, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
