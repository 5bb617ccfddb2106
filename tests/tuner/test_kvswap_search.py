"""KVSwap's search: near the best of a planted machine, on few measurements, none made twice."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import BudgetError
from penstock.devices.presets import EMMC, NVME
from penstock.devices.profile import DeviceProfile
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.model_shape import inspect_model
from penstock.tuner import kvswap_search, tuning_task
from penstock.tuner.block_profile import BlockProfile, Work, work_of
from penstock.tuner.candidates import Candidate, Seat, lighter_twin
from penstock.tuner.engine_run import StepFigures, Workpiece
from penstock.tuner.journal import Journal
from penstock.tuner.kvswap_search import (
    CHECKS,
    CORNER_CHECKS,
    CORNER_POINTS,
    FINALISTS,
    POINTS,
    TURNS,
    Found,
    KVSwapSearch,
    Spot,
)
from penstock.tuner.tuning_task import TuningTask
from penstock.workloads.synthetic_kv import SyntheticKV

MakeTask = Callable[..., TuningTask]
CPU = BlockProfile(
    rank=(1.5e-3, 0.2e-3, 2e-3, 9e-3, 8e-3, 2e-3, 1e-3, 1e-3),
    block=(8e-3, 2e-3, 12e-3, 1e-3, 1e-3),
    io_factor=1.2, neighbours={}, device=NVME,
)  # fmt: skip
"""Ranking costs about as much as reading."""
NOISE = cache(SyntheticKV)
"""Of works that are not decoded."""


class Machine:
    """Stands in for the engine: it decodes in no time and takes what a planted profile says."""

    def __init__(self, truth: BlockProfile, noise: float = 0.0) -> None:
        self.truth, self.noise = truth, noise
        self.draw = random.Random(0)
        self.opened: list[KVSwap] = []
        self.now_open = self.most_open = 0
        self.breaks_at: int | None = None
        self.task: TuningTask | None = None
        self.seat: Seat | None = None

    def work(self, policy: KVSwap, batch: int, context: int, limit: int | None) -> Work:
        seat = self.seat
        assert self.task is not None
        assert seat is not None
        request = seat.request(policy, batch=batch, max_tokens=context, limit_bytes=limit)
        chosen, plan = seat.plan(policy, request)
        assert chosen == policy, "what is run has no open choice"
        assert limit is None or plan.total_bytes <= limit
        rate = self.task.tables.reuse_rate(
            plan.group_tokens, plan.selected_units * plan.group_tokens,
            plan.num_slots * plan.group_tokens,
        )  # fmt: skip
        return work_of(
            plan, rows_per_sequence=1, num_layers=seat.shape.num_layers, context=context,
            hit_rate=rate, row_bytes=request.padded_bytes(plan.group_tokens),
            true_query_layers=seat.true_query_layers,
        )  # fmt: skip

    def step_s(self, spot: Spot, candidate: Candidate) -> float:
        """What a setting really takes."""
        done = self.work(candidate.policy, spot.batch, spot.context, spot.limit_bytes)
        return self.truth.predict(done)[0]

    def __call__(
        self, work: Workpiece, policy: KVSwap, *, store: str, limit_bytes: int | None
    ) -> "Decode":
        if len(self.opened) == self.breaks_at:
            raise RuntimeError("the plug was pulled")
        self.opened.append(policy)
        self.now_open += 1
        self.most_open = max(self.most_open, self.now_open)
        return Decode(self, self.work(policy, work.batch, work.max_tokens, limit_bytes))


class Decode:
    def __init__(self, machine: Machine, work: Work) -> None:
        self.machine, self.work, self.steps = machine, work, 0

    def decode(self, steps: int) -> None:
        self.steps += steps

    def figures(self) -> StepFigures:
        machine, work = self.machine, self.work
        ranking = replace(machine.truth, block=(0.0,) * 5)
        slower = 1 + machine.draw.gauss(0.0, machine.noise)
        step_s, stall_s = machine.truth.predict(work)
        return StepFigures(
            step_s=step_s * slower, select_s=work.num_layers * ranking.layer_s(work) * slower,
            stall_s=stall_s * slower, reads=work.reads, read_bytes=work.read_bytes,
            units_wanted=work.selected, units_hit=work.selected - work.missing,
            resident_bytes=1, fill_s=0.1, steps=self.steps,
        )  # fmt: skip

    def close(self) -> None:
        self.machine.now_open -= 1


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[TuningTask, Machine], None]:
    def put(task: TuningTask, machine: Machine) -> None:
        machine.task, machine.seat = task, task.seat(KVSwap())
        monkeypatch.setattr(kvswap_search, "EngineRun", machine)

    monkeypatch.setattr(tuning_task, "SyntheticKV", NOISE)
    return put


PlugIn = Callable[[TuningTask, Machine], None]


def searched(task: TuningTask) -> KVSwapSearch:
    search = KVSwapSearch(task)
    search.spread()
    search.solve()
    return search


def good_ones(spot: Spot, floor: float) -> list[Candidate]:
    return [each for each in spot.found if each.kl is None or each.kl <= floor]


def summary(found: list[Found]) -> list[Any]:
    return [
        (
            each.spot.batch, each.spot.context, each.best.candidate.policy, each.best.step_s,
            each.measured, None if each.paper is None else each.paper.candidate.policy,
        )
        for each in found
    ]  # fmt: skip


# A planted machine ------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "share"), [(NVME, 0.3), (EMMC, 0.6)], ids=["nvme", "emmc"])
def test_nearly_the_best_of_all_from_a_dozen_runs(
    make_task: MakeTask, plug_in: PlugIn, device: DeviceProfile, share: float
) -> None:
    full = inspect_model(make_task().model).kv.full_cache_bytes(1, 4096)
    task = make_task(max_context=4096, device=device, limit_bytes=int(full * share))
    machine = Machine(replace(CPU, device=device), noise=0.01)
    plug_in(task, machine)
    search = searched(task)
    [found] = search.found
    allowed = good_ones(found.spot, task.floor)
    best = min(machine.step_s(found.spot, each) for each in allowed)
    assert len(allowed) > 30
    assert best / machine.step_s(found.spot, found.best.candidate) >= 0.95
    assert len(search.runs) == POINTS + CHECKS
    assert len(set(machine.opened)) == len(search.settings) <= POINTS + CHECKS + 1
    assert len(machine.opened) == POINTS + CHECKS + FINALISTS == search.measurements
    assert task.journal.made == len(machine.opened)
    assert found.best.candidate in allowed
    # Where it was run, the pick is the fastest of the finalists, or its lighter twin.
    assert found.measured is not None
    finals = [search.measured(found.spot, policy) for policy in machine.opened[-FINALISTS:]]
    fastest = min(each.step_s for each in finals if each is not None)
    assert found.measured.step_s <= kvswap_search.TWIN_SHARE * fastest
    assert machine.most_open <= kvswap_search.OPEN_RUNS
    assert machine.now_open == 0


@pytest.mark.parametrize(("slower", "taken"), [(1.04, True), (1.06, False)])
def test_of_two_that_differ_in_rank_alone_the_lighter_is_taken_unless_it_is_clearly_slower(
    make_task: MakeTask, plug_in: PlugIn, slower: float, taken: bool
) -> None:
    """Ranking costs nothing on this machine, and caches of the smallest rank have bad luck."""
    free = BlockProfile(
        rank=(1e-3, *[0.0] * 7), block=CPU.block, io_factor=1.0, neighbours={}, device=NVME
    )
    task, machine = make_task(max_context=4096), Machine(free)
    plug_in(task, machine)
    search = KVSwapSearch(task)
    found_policies = [each.policy for each in search.spots[0].found]
    least = min(each.rank or 0 for each in found_policies if each.index_bits == 8)

    class Unlucky(Decode):
        share = 1.0

        def figures(self) -> StepFigures:
            plain = super().figures()
            return replace(plain, step_s=self.share * plain.step_s)

    def called(self: Machine, work: Workpiece, policy: KVSwap, **options: Any) -> Decode:
        made = Machine.__call__(self, work, policy, **options)
        made.__class__ = Unlucky
        assert isinstance(made, Unlucky)
        made.share = slower if policy.rank == least else 1.0
        return made

    machine.__class__ = type("Unlucky", (Machine,), {"__call__": called})
    search.spread()
    search.solve()
    [found] = search.found
    pick = found.best.candidate
    twin = lighter_twin(pick, good_ones(found.spot, task.floor))
    assert (pick.policy.rank == least) == taken
    assert twin.policy in machine.opened, "it was a finalist"
    assert (twin == pick) == taken
    assert (twin.choice, twin.policy.index_bits) == (pick.choice, pick.policy.index_bits)
    assert twin.policy.rank == least


def test_a_grid_is_solved_from_its_corners(sparse: MakeTask, plug_in: PlugIn) -> None:
    task, machine = sparse(max_context=8192, max_batch=3), Machine(CPU, noise=0.01)
    plug_in(task, machine)
    search = searched(task)
    places = [(each.spot.batch, each.spot.context) for each in search.found]
    assert places == [(batch, context) for batch in (1, 2, 3) for context in (2048, 4096, 8192)]
    assert len(search.runs) == 4 * (CORNER_POINTS + CORNER_CHECKS)
    assert {(spot.batch, spot.context) for spot, _, _, _ in search.runs} == set(task.corners)
    assert search.profile is not None
    for each in search.found:
        spot, pick = each.spot, each.best.candidate
        allowed = good_ones(spot, task.floor)
        assert spot.limit_bytes == task.limit_for(spot.batch)
        assert pick in allowed
        assert pick.resident_bytes <= spot.limit_bytes
        assert (each.measured is not None) == ((spot.batch, spot.context) in task.corners)
        best = min(machine.step_s(spot, each) for each in allowed)
        assert best / machine.step_s(spot, pick) >= 0.93, (spot.batch, spot.context)
        assert each.paper is not None
        assert abs(each.paper.candidate.selected_tokens - 400) < 16
        assert each.paper.candidate in allowed
    assert search.picks == list(dict.fromkeys(e.best.candidate.policy for e in search.found))


def test_progress_goes_forward(sparse: MakeTask, plug_in: PlugIn) -> None:
    said: list[float] = []
    task = sparse(say=lambda share, what: said.append(share))
    plug_in(task, Machine(CPU))
    searched(task)
    assert len(said) > 4
    assert 0 <= min(said) <= max(said) <= 1
    assert said == sorted(said)


# The journal ------------------------------------------------------------------------------------


def journal_of(path: Path) -> Journal:
    return Journal(path, {"model": "tiny"})


def test_a_finished_search_is_not_run_again(
    sparse: MakeTask, plug_in: PlugIn, tmp_path: Path
) -> None:
    task, machine = sparse(journal=journal_of(tmp_path / "j")), Machine(CPU, noise=0.02)
    plug_in(task, machine)
    first = searched(task)
    again = sparse(journal=journal_of(tmp_path / "j"))
    idle = Machine(CPU)
    idle.breaks_at = 0
    plug_in(again, idle)
    second = searched(again)
    assert summary(second.found) == summary(first.found)
    assert again.journal.made == 0
    assert len(again.journal.used) == first.measurements
    elsewhere = sparse(journal=journal_of(tmp_path / "j"), store="nvme")
    plug_in(elsewhere, idle)
    with pytest.raises(RuntimeError, match="the plug was pulled"):
        KVSwapSearch(elsewhere).spread()


def test_an_interrupted_search_makes_only_what_is_missing(
    sparse: MakeTask, plug_in: PlugIn, tmp_path: Path
) -> None:
    whole = sparse()
    plug_in(whole, Machine(CPU))
    expected = searched(whole)
    kept = 0
    for breaks_at in (2, 13):  # the second time in what the first left to do
        broken = Machine(CPU)
        broken.breaks_at = breaks_at
        task = sparse(journal=journal_of(tmp_path / "j"))
        plug_in(task, broken)
        with pytest.raises(RuntimeError, match="the plug was pulled"):
            searched(task)
        assert broken.now_open == 0, "caches are given back"
        assert task.journal.made >= breaks_at - kvswap_search.OPEN_RUNS
        kept += task.journal.made

    resumed, machine = sparse(journal=journal_of(tmp_path / "j")), Machine(CPU)
    plug_in(resumed, machine)
    found = searched(resumed)
    assert summary(found.found) == summary(expected.found)
    assert resumed.journal.made == len(machine.opened) == expected.measurements - kept


def test_in_a_grid_rounds_are_taken_in_turns_and_the_faster_one_counts(
    sparse: MakeTask, plug_in: PlugIn
) -> None:
    """The machine is twice as slow until every corner had its first turn."""
    task, machine = sparse(), Machine(CPU)
    plug_in(task, machine)
    first = 4 * CORNER_POINTS
    calm = type(machine).__call__
    opened: list[int] = []

    class Slow(Decode):
        def figures(self) -> StepFigures:
            fast = super().figures()
            return replace(fast, step_s=2 * fast.step_s, select_s=2 * fast.select_s)

    def called(self: Machine, *args: Any, **options: Any) -> Decode:
        opened.append(1)
        made = calm(self, *args, **options)
        return Slow(self, made.work) if len(opened) <= first else made

    machine.__class__ = type("Slow", (Machine,), {"__call__": called})
    search = KVSwapSearch(task)
    search.spread()
    assert machine.opened[:first] == machine.opened[first:], "every corner, then every corner again"
    assert len(search.runs) == first
    assert search.measurements == TURNS * first == len(machine.opened)
    for spot, policy, _, figures in search.runs:
        [candidate] = [each for each in spot.found if each.policy == policy]
        assert figures.step_s == pytest.approx(machine.step_s(spot, candidate))


def test_nothing_is_run_twice(sparse: MakeTask, plug_in: PlugIn) -> None:
    task, machine = sparse(max_context=2048, max_batch=1), Machine(CPU)
    plug_in(task, machine)
    search = KVSwapSearch(task)
    [spot] = search.spots
    search.measure(spot, spot.found[:6])
    search.measure(spot, spot.found[3:9])
    search.measure(spot, [])
    assert machine.opened == [each.policy for each in spot.found[:9]]
    assert [policy for _, policy, _, _ in search.runs] == machine.opened
    figures = search.measured(spot, spot.found[2].policy)
    assert figures is not None
    assert figures.step_s == pytest.approx(machine.step_s(spot, spot.found[2]))
    assert search.measured(spot, spot.found[20].policy) is None


def test_what_was_done_is_what_the_engine_counted(sparse: MakeTask, plug_in: PlugIn) -> None:
    """Hits and reads of a run count, not those of the tables."""
    task, machine = sparse(max_context=2048, max_batch=1), Machine(CPU)
    plug_in(task, machine)

    class Luckier(Decode):
        def figures(self) -> StepFigures:
            return replace(
                super().figures(), units_wanted=1000.0, units_hit=900.0, reads=50.0,
                read_bytes=12345.0,
            )  # fmt: skip

    machine.__class__ = type(
        "Lucky", (Machine,),
        {"__call__": lambda self, work, policy, *, store, limit_bytes: Luckier(
            self, self.work(policy, work.batch, work.max_tokens, limit_bytes))},
    )  # fmt: skip
    search = KVSwapSearch(task)
    search.measure(search.spots[0], search.spots[0].found[:1])
    [(_, _, done, _)] = search.runs
    assert (done.missing, done.reads, done.read_bytes) == (100, 50, 12345)


# Refusals ---------------------------------------------------------------------------------------


def test_a_pick_that_is_ruled_out_makes_room_for_the_next(
    sparse: MakeTask, plug_in: PlugIn
) -> None:
    task = sparse(max_context=2048, max_batch=1)
    plug_in(task, Machine(CPU))
    search = searched(task)
    seen = list[KVSwap]()
    for _ in range(2):
        [pick] = search.picks
        assert pick not in seen
        seen.append(pick)
        search.rule_out(pick)
        search.solve()
    for each in search.spots[0].found:
        search.rule_out(each.policy)
    with pytest.raises(BudgetError, match="more memory, or a higher --floor"):
        search.solve()
