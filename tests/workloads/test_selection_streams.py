"""Streams of selections: any method's costs, with units that somebody else chose."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest
from penstock.methods import POLICIES, FlexGen, Full, KVSwap, SelectionPolicy
from penstock.methods.kvswap.index import LowRankIndex
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter, random_model
from penstock.testing.integrity import check_slots
from penstock.workloads.selection_streams import (
    LayerStream,
    OverlapStream,
    SelectionStream,
    Step,
    StreamedIndex,
    Taken,
    streamed,
    units_of,
)
from penstock.workloads.synthetic_kv import SyntheticKV

CONTEXT, STEPS = 1400, 3
RANKS = {"louiskv": "begin_step", "dynakv": "_scores"}
"""What an index is asked at every step, where it is not `score`."""
SLOTS: dict[str, Any] = {
    "hillinfer": {"selected_tokens": 200, "hot_tokens": 2},
    "kvswap": {"selected_tokens": 200, "reuse_tokens": 200},
}
"""Options without which a method holds more than one selection."""
MEMORY = {"dynakv": "9/10"}
"""Where so much of a tiny cache is too little: a prompt is clustered a whole row at a time."""
REPLACED = sorted(name for name, p in POLICIES.items() if p.retrieves and not p.drops)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model("tiny", max_positions=4096)


class Watched(SelectionStream):
    """Another stream; keeps what each layer chose and what it could choose from."""

    def __init__(self, stream: SelectionStream) -> None:
        self._stream = stream
        self.steps: dict[int, list[tuple[Step, Selection]]] = {}

    def layer_stream(self, layer: int, request: IndexRequest) -> LayerStream:
        inner, steps = self._stream.layer_stream(layer, request), self.steps.setdefault(layer, [])
        choose = inner.choose

        def choose_and_tell(step: Step) -> Selection:
            steps.append((step, choose(step)))
            return steps[-1][1]

        inner.choose = choose_and_tell  # type: ignore[method-assign]
        return inner

    def describe(self) -> str:
        return self._stream.describe()


@contextmanager
def filled(
    model: CausalLM, policy: SelectionPolicy, *, batch: int = 1, memory: str = "3/4"
) -> Iterator[TieredCache]:
    """A cache with a synthetic document."""
    with TieredCache(
        model, policy, store="memory", max_tokens=CONTEXT + 64, memory=memory, batch_size=batch,
        adapter=random_adapter(model) if policy.uses_adapter else None,
    ) as cache:  # fmt: skip
        SyntheticKV(inspect_model(model).kv, batch, torch.device("cpu")).fill(cache, CONTEXT)
        yield cache


def decode(model: Any, cache: TieredCache, steps: int = STEPS, batch: int = 1) -> None:
    ids = torch.ones((batch, 1), dtype=torch.int64)
    for _ in range(steps):
        position = torch.full((batch, 1), cache.get_seq_length())
        with torch.no_grad():
            model(ids, **cache_argument(model, cache), position_ids=position)


def shares(selections: list[Selection]) -> NDArray[np.float64]:
    """Of each row's units the share that the step before had. [steps - 1, rows]"""
    out = []
    for before, after in pairwise(selections):
        rows = zip(units_of(before).tolist(), units_of(after).tolist(), strict=True)
        out.append([len(set(a) & set(b) - {-1}) / len(set(b) - {-1}) for a, b in rows])
    return np.array(out)


@pytest.mark.parametrize(
    ("name", "overlap"),
    [(name, 0.77) for name in REPLACED]
    + [(name, overlap) for name in ("hillinfer", "loki", "kvswap") for overlap in (0.0, 1.0)],
)
def test_every_method_overlaps_as_much_as_it_says(
    name: str, overlap: float, model: CausalLM
) -> None:
    watched = Watched(OverlapStream(overlap=overlap))
    policy = streamed(POLICIES[name](**SLOTS.get(name, {})), watched)
    with filled(model, policy, batch=2) as cache:
        decode(model, cache, batch=2)
        assert not cache.plan.is_resident
        assert cache.policy.name == name
        counted, shared = cache.stats.decode, cache.plan.shared_pools
        selected = cache.plan.selected_units
        assert cache.plan.num_slots == selected
    assert sorted(watched.steps) == [0, 1, 2], "one stream a layer"
    for steps in watched.steps.values():
        assert len(steps) == STEPS
        for step, selection in steps:
            assert selection.valid is None
            assert selection.unit_ids.shape[1] == selected
            assert (np.diff(selection.unit_ids, axis=1) > 0).all(), "ascending and unique"
            assert (selection.unit_ids >= step.first_unit[:, None]).all()
            assert (selection.unit_ids < step.end_unit).all()
        found = shares([selection for _, selection in steps])
        assert found == pytest.approx(round(overlap * selected) / selected)
    # The first step finds empty slots.
    expected = 0.0 if shared else overlap * (STEPS - 1) / STEPS
    assert counted.hit_rate == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - set(REPLACED)))
def test_what_cannot_be_replaced_stays_as_it_is(name: str) -> None:
    policy = POLICIES[name]()
    assert streamed(policy, OverlapStream()) is policy


def test_the_first_step_is_the_methods_own(model: CausalLM) -> None:
    watched = Watched(OverlapStream(overlap=0.5))
    with filled(model, streamed(KVSwap(selected_tokens=160), watched)) as cache:
        index = cache.tiers.layers[1].index  # type: ignore[attr-defined]
        assert isinstance(index, StreamedIndex)
        seen: list[torch.Tensor] = []
        score = type(index.inner).score

        def noted(query: torch.Tensor, num_units: int) -> torch.Tensor:
            seen.append(score(index.inner, query, num_units))
            return seen[-1]

        vars(index.inner).update(score=noted, best_units=lambda *_: None)
        decode(model, cache, steps=1)
    (step, selection), first = watched.steps[1][0], int(watched.steps[1][0][0].first_unit[0])
    best = seen[0][:, first:].topk(step.wanted, dim=1).indices.sort(dim=1).values + first
    assert selection.unit_ids.tolist() == best.tolist()


def test_fresh_units_are_the_best_of_the_others() -> None:
    stream = OverlapStream(overlap=0.5).layer_stream(0, None)  # type: ignore[arg-type]
    scores = np.arange(20.0)
    calls = 0

    def own(count: int, taken: Taken) -> Selection:
        nonlocal calls
        calls += 1
        seen = scores[None].repeat(2, axis=0)
        if taken is not None:
            np.put_along_axis(seen, taken.astype(np.int64, casting="safe"), -np.inf, axis=1)
        return Selection(np.sort(np.argsort(-seen, axis=1)[:, :count], axis=1), None)

    step = Step(first_unit=np.array([2, 2]), end_unit=20, wanted=4, own=own)
    first = stream.choose(step)
    assert first.unit_ids.tolist() == [[16, 17, 18, 19]] * 2
    scores = -scores  # now the first ones are best, of which 0 and 1 may not be chosen
    scores[:2] = -np.inf
    second = stream.choose(step)
    for row in second.unit_ids.tolist():
        assert row[:2] == [2, 3]
        assert set(row[2:]) < {16, 17, 18, 19}
    assert calls == 2, "it scores once a step"


def test_rows_of_different_lengths(model: CausalLM) -> None:
    """Padding: a row that has fewer units than wanted gets all of them; the others overlap."""
    watched = Watched(OverlapStream(overlap=0.5))
    policy = streamed(KVSwap(selected_tokens=64, window_tokens=8), watched)
    tokens, padding = 160, (0, 100)
    ids = torch.randint(1, 512, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(padding):
        mask[row, :pad] = 0
    with TieredCache(
        model, policy, store="memory", max_tokens=200, batch_size=2, memory="1/1",
        adapter=random_adapter(model),
    ) as cache:  # fmt: skip
        model.generate(
            input_ids=ids, attention_mask=mask, **cache_argument(model, cache), max_new_tokens=6,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        check_slots(cache.tiers.layers[0].table)  # type: ignore[attr-defined]
    for steps in watched.steps.values():
        assert len(steps) == 5
        for step, selection in steps:
            units = [[u for u in row if u >= 0] for row in units_of(selection).tolist()]
            assert [len(set(row)) for row in units] == [len(row) for row in units]
            assert len(units[0]) == step.wanted == 16
            there = range(int(step.first_unit[1]), step.end_unit)
            assert units[1] == list(there)
            assert 0 < len(there) < 16
        assert shares([s for _, s in steps])[:, 0] == pytest.approx(0.5)


def test_few_units_are_topped_up_from_the_step_before(model: CausalLM) -> None:
    """100 of 130 units are wanted and none shall repeat: 70 must."""
    watched = Watched(OverlapStream(overlap=0.0))
    policy = streamed(KVSwap(selected_tokens=400, reuse_tokens=400, window_tokens=0), watched)
    with TieredCache(
        model, policy, store="memory", max_tokens=600, memory="1/1", adapter=random_adapter(model)
    ) as cache:
        SyntheticKV(inspect_model(model).kv, 1, torch.device("cpu")).fill(cache, 524)
        decode(model, cache, steps=3)
    steps = watched.steps[0]
    assert [selection.unit_ids.shape for _, selection in steps] == [(1, 100)] * 3
    there = [step.end_unit - int(step.first_unit[0]) for step, _ in steps]
    found = shares([selection for _, selection in steps])[:, 0]
    assert found == pytest.approx([(200 - count) / 100 for count in there[1:]])


@pytest.mark.parametrize("name", REPLACED)
def test_all_work_is_done(name: str, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index scores, fits, looks and takes in as often as without a stream."""
    calls: dict[str, list[Any]] = {}

    def count(cls: type, method: str) -> None:
        original = getattr(cls, method)

        def counted(self: Any, *args: Any) -> Any:
            calls.setdefault(method, []).append([getattr(a, "shape", a) for a in args])
            return original(self, *args)

        monkeypatch.setattr(cls, method, counted)

    # What is scored and chosen in one call is scored all the same.
    monkeypatch.setattr(LowRankIndex, "best_units", KeyIndex.best_units)
    done = []
    plain, ranks = POLICIES[name](), RANKS.get(name, "score")
    for number, policy in enumerate((plain, streamed(plain, OverlapStream()))):
        calls.clear()
        with filled(model, policy, memory=MEMORY.get(name, "3/4")) as cache:
            if number == 0:
                inner = type(cache.tiers.layers[0].index)  # type: ignore[attr-defined]
                for method in (ranks, "fit", "look", "append"):
                    count(inner, method)
            decode(model, cache)
            done.append(dict(calls))
            plan = cache.plan
        assert plan.selected_units
    assert len(done[0][ranks]) == 3 * STEPS
    fitted = {method: found for method, found in done[0].items() if method != "append"}
    assert fitted == {method: found for method, found in done[1].items() if method != "append"}


def test_a_streamed_policy_is_its_method_still() -> None:
    policy = streamed(KVSwap(group_tokens=8), OverlapStream(overlap=0.25, seed=3))
    assert isinstance(policy, KVSwap)
    assert policy.name == "kvswap"
    assert {f.name for f in fields(policy)} == {f.name for f in fields(KVSwap)} | {"stream"}
    changed = replace(policy, rank=16)
    assert type(changed) is type(policy) is type(streamed(KVSwap(), OverlapStream()))
    same = OverlapStream(overlap=0.25, seed=3)
    assert changed == streamed(KVSwap(group_tokens=8, rank=16), same)
    again: Any = streamed(policy, OverlapStream(overlap=0.5))
    assert again.stream.overlap == 0.5
    assert again.group_tokens == 8
    assert type(again) is type(policy)
    assert streamed(Full(), OverlapStream()) == Full()
    assert streamed(FlexGen(), OverlapStream()) == FlexGen()


def test_a_stream_follows_its_sequences(model: CausalLM) -> None:
    """Reordered rows take their last selections along, and a new sequence has none."""
    watched = Watched(OverlapStream(overlap=1.0))
    with filled(model, streamed(KVSwap(), watched), batch=2) as cache:
        decode(model, cache, steps=2, batch=2)
        cache.reorder_cache(torch.tensor([1, 0]))
        decode(model, cache, steps=1, batch=2)
        cache.crop(CONTEXT - 500)
        decode(model, cache, steps=1, batch=2)
        cache.reset()
        SyntheticKV(inspect_model(model).kv, 2, torch.device("cpu"), seed=5).fill(cache, CONTEXT)
        decode(model, cache, steps=1, batch=2)
    steps = watched.steps[1]
    units = [selection.unit_ids for _, selection in steps]
    assert units[1].tolist() == units[0].tolist()
    assert units[2].tolist() == units[1][::-1].tolist()
    assert units[3].max() < steps[3][0].end_unit < steps[2][0].end_unit
    left = [set(row[row < steps[3][0].end_unit].tolist()) for row in units[2]]
    repeated = [len(a & set(b)) for a, b in zip(left, units[3].tolist(), strict=True)]
    assert min(repeated) == min(len(a) for a in left) > 20, "what is left repeats after a crop"
    assert not np.array_equal(units[4], units[3])


@pytest.mark.parametrize("overlap", [-0.1, 1.1])
def test_a_share_is_a_share(overlap: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        OverlapStream(overlap=overlap)
