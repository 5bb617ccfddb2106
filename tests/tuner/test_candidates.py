"""Candidates: what the engine itself would plan, within the budget, each once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from penstock.core.errors import BudgetError
from penstock.engine.adapter import LowRankAdapter
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import settings_of
from penstock.models.cache_adapter import TieredCache
from penstock.models.model_shape import inspect_model
from penstock.tuner.candidates import CalibratedTables, Candidate, PaperTables, candidates
from penstock.tuner.lookup_tables import CAPACITIES, LookupTables, TableEntry
from penstock.tuner.tuning_task import TuningTask

CONTEXT = 2048
SOME = [s for s in settings_of(KVSwap) if isinstance(s, KVSwap)][::4]
"""For tests to which it does not matter which settings there are."""
MakeTask = Callable[..., TuningTask]


def store_of(kind: str, folder: Path) -> str:
    return {"memory": "memory", "nvme": "nvme", "disk": str(folder)}[kind]


def found_at(
    task: TuningTask, batch: int, limit: int | None, settings: list[KVSwap] | None = None
) -> tuple[list[Candidate], int | None]:
    return candidates(
        task.seat(KVSwap()), task.tables, batch=batch, context=CONTEXT, max_tokens=CONTEXT,
        limit_bytes=limit, settings=settings,
    )  # fmt: skip


def budget(task: TuningTask, share: float | None, batch: int = 1) -> int | None:
    full = inspect_model(task.model).kv.full_cache_bytes(batch, CONTEXT)
    return None if share is None else int(full * share)


def every(count: int, items: list[Candidate]) -> list[Candidate]:
    return items[:: max(1, len(items) // count)]


# The engine's own plans -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "with_adapter", "share", "batch"),
    [
        ("memory", True, 0.3, 1), ("memory", False, 0.4, 2), ("nvme", True, 0.9, 3),
        ("disk", True, 0.4, 2), ("disk", False, 0.32, 1), ("disk", True, None, 1),
    ],
)  # fmt: skip
def test_plans_are_those_of_the_engine(
    make_task: MakeTask, tmp_path: Path, kind: str, with_adapter: bool, share: float | None,
    batch: int,
) -> None:  # fmt: skip
    task = make_task(store=store_of(kind, tmp_path))
    task = task if with_adapter else make_task(store=task.store, adapter=None)
    limit = budget(task, share, batch)
    found, _ = found_at(task, batch, limit, SOME)
    assert len(found) > 10
    for each in every(8, found):
        with TieredCache(
            task.model, each.policy, memory=limit, store=task.store, max_tokens=CONTEXT,
            batch_size=batch, adapter=task.adapter,
        ) as cache:  # fmt: skip
            assert cache.plan == each.plan
            assert cache.policy == each.policy, "no choice is left open"


@pytest.mark.parametrize(("share", "refuses"), [(0.2, True), (0.9, False)])
def test_what_a_setting_asks_for_is_what_its_candidate_is(
    make_task: MakeTask, share: float, refuses: bool
) -> None:
    """A setting with open choices, as a user writes it, has the plan of its candidate."""
    task = make_task()
    limit = budget(task, share)
    refused = 0
    for setting in [s for s in settings_of(KVSwap) if isinstance(s, KVSwap)][::25]:
        found, least = found_at(task, 1, limit, [setting])
        opened = partial(
            TieredCache, task.model, setting, limit, "memory", max_tokens=CONTEXT,
            adapter=task.adapter,
        )  # fmt: skip
        if found:
            with opened() as cache:
                assert [each.plan for each in found] == [cache.plan]
                assert least is None
        else:
            refused += 1
            with pytest.raises(BudgetError) as caught:
                opened()
            assert caught.value.needed_bytes == least
    assert (refused > 0) == refuses


def test_layers_that_are_not_predicted_take_no_copies(make_task: MakeTask) -> None:
    """An adapter that says of every layer that its prediction is bad."""
    task = make_task()
    assert task.adapter is not None
    late = type(task.adapter)(task.adapter.layers, task.adapter.fingerprint, 0, (0.1,) * 3)
    task = make_task(adapter=late)
    found, _ = found_at(task, 1, budget(task, 0.9), SOME)
    assert {each.plan.predictor_bytes for each in found} == {0}
    assert found[0].work.true_query_layers == {0, 1, 2}
    with TieredCache(
        task.model, found[0].policy, memory=budget(task, 0.9), store="memory", max_tokens=CONTEXT,
        adapter=late,
    ) as cache:  # fmt: skip
        assert cache.plan == found[0].plan


def test_no_more_components_than_the_adapter_has(make_task: MakeTask) -> None:
    rank = 50
    task = make_task()
    assert task.adapter is not None
    layers = [layer.truncated(rank) for layer in task.adapter.layers]
    lean = LowRankAdapter(layers, task.adapter.fingerprint, 0)
    every_rank = {each.policy.rank or 0 for each in found_at(task, 1, budget(task, 0.5), SOME)[0]}
    assert max(every_rank) > rank
    found, _ = found_at(make_task(adapter=lean), 1, budget(task, 0.5), SOME)
    assert {each.policy.rank for each in found} == {r for r in every_rank if r <= rank}


# Within the budget, each once -------------------------------------------------------------------


@pytest.mark.parametrize(("share", "batch"), [(0.2, 1), (0.5, 3)])
def test_never_above_the_budget_and_each_once(
    make_task: MakeTask, share: float, batch: int
) -> None:
    task = make_task()
    limit = budget(task, share, batch)
    assert limit is not None
    found, _ = found_at(task, batch, limit)
    assert found
    assert all(each.resident_bytes <= limit for each in found)
    assert all(each.resident_bytes == each.plan.total_bytes for each in found)
    kinds = [
        (
            each.plan.group_tokens, each.selected_tokens, each.capacity_tokens, each.policy.rank,
            each.policy.index_bits, each.policy.window_tokens,
        )
        for each in found
    ]  # fmt: skip
    assert len(set(kinds)) == len(kinds)
    for each in found:
        assert each.policy.selected_tokens == each.selected_tokens
        assert each.policy.reuse_tokens == each.capacity_tokens
        assert each.capacity_tokens == 0 or each.capacity_tokens >= each.selected_tokens
        assert each.work.context == CONTEXT
        assert each.work.batch == batch


def test_more_memory_loses_nothing_that_was_chosen_by_hand(make_task: MakeTask) -> None:
    """Settings with every choice made fit a larger budget if they fit a smaller one."""
    task, before = make_task(), set[KVSwap]()
    closed = [
        KVSwap(group_tokens=g, selected_tokens=m, reuse_tokens=c, rank=r, index_bits=8)
        for g in (1, 4, 16) for m in (400, 200) for c in (0, 400, 800) for r in (32, 64)
    ]  # fmt: skip
    for share in (0.1, 0.2, 0.3, 0.5, 0.9):
        now = {s for s in closed if found_at(task, 1, budget(task, share), [s])[0]}
        assert before <= now
        before = now
    assert before == set(closed)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_least_budget_is_the_least(make_task: MakeTask, batch: int) -> None:
    task = make_task()
    found, least = found_at(task, batch, 1000, SOME)
    assert found == []
    assert least is not None
    assert found_at(task, batch, least - 1, SOME)[0] == []
    found, larger = found_at(task, batch, least, SOME)
    assert found
    assert larger is None or larger > least


def test_everything_in_memory_is_no_candidate(make_task: MakeTask) -> None:
    task = make_task()
    found, least = found_at(task, 1, None, [KVSwap()])
    assert (found, least) == ([], None)


# Tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskedTables:
    """A rate and a divergence that say what was asked."""

    asked: list[tuple[int, int, int]]

    def reuse_rate(self, group_tokens: int, selected_tokens: int, capacity_tokens: int) -> float:
        self.asked.append((group_tokens, selected_tokens, capacity_tokens))
        return 0.6

    def kl(self, policy: KVSwap) -> float | None:
        assert None not in (policy.rank, policy.index_bits, policy.selected_tokens)
        return policy.group_tokens / 100


def test_tables_are_asked_about_what_was_planned(make_task: MakeTask) -> None:
    tables = AskedTables([])
    task = make_task(tables=tables)
    found, _ = found_at(task, 1, budget(task, 0.35), SOME)
    with_reuse = [each for each in found if each.capacity_tokens]
    without = [each for each in found if not each.capacity_tokens]
    assert with_reuse
    assert without
    assert set(tables.asked) == {
        (each.plan.group_tokens, each.selected_tokens, each.capacity_tokens) for each in with_reuse
    }
    for each in found:
        missing = 1.0 if each in without else 0.4
        assert each.work.missing == pytest.approx(missing * each.work.selected)
        assert each.kl == each.plan.group_tokens / 100
        unit = each.plan.group_tokens * inspect_model(task.model).kv.token_bytes
        row = each.work.read_bytes / each.work.missing
        assert unit <= row < unit + 4096


def test_the_papers_tables() -> None:
    tables = PaperTables(joint_dim=1024)
    assert tables.reuse_rate(4, 400, 400) == 0.77
    assert tables.reuse_rate(4, 400, 1600) == 0.77
    assert tables.reuse_rate(4, 400, 200) == pytest.approx(0.385)
    good = KVSwap(group_tokens=4, selected_tokens=400, rank=64, index_bits=8)
    assert tables.kl(good) is None
    assert tables.kl(replace(good, rank=32)) is None, "sigma of 32"
    assert tables.kl(replace(good, rank=31)) == float("inf")
    assert tables.kl(replace(good, group_tokens=8)) is None
    assert tables.kl(replace(good, group_tokens=16)) == float("inf")
    assert tables.kl(replace(good, selected_tokens=399)) == float("inf")
    assert tables.kl(replace(good, group_tokens=7, selected_tokens=399)) is None, "57 whole groups"


def test_calibrated_tables_say_what_was_measured() -> None:
    entries = tuple(
        TableEntry(
            group_tokens=group, selected_tokens=400, rank=48, index_bits=8, kl=kl, kl_p90=kl,
            agreement=1.0, reuse=tuple(min(1.0, 0.3 * c) for c in CAPACITIES),
        )
        for group, kl in ((4, 0.01), (16, 0.05))
    )  # fmt: skip
    tables = CalibratedTables(
        measured=LookupTables(model="m", fingerprint="f", tokens=9, texts="", entries=entries)
    )
    policy = KVSwap(group_tokens=16, selected_tokens=400, rank=48, index_bits=8)
    assert tables.kl(policy) == pytest.approx(0.05)
    assert tables.kl(replace(policy, group_tokens=4)) == pytest.approx(0.01)
    assert tables.reuse_rate(4, 400, 800) == pytest.approx(0.6)
