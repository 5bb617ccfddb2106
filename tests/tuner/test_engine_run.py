"""EngineRun: what a decode by hand counts, within the plan, and medians at one pace."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from penstock.core.errors import BudgetError
from penstock.engine.adapter import LowRankAdapter
from penstock.methods import FlexGen, KVSwap, SelectionPolicy
from penstock.methods.baselines.quest import Quest
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import share_weights
from penstock.tuner.engine_run import (
    SLOW_ROUND_S,
    WARM_STEPS,
    EngineRun,
    StepFigures,
    Workpiece,
    as_dict,
    at_one_pace,
    run_together,
)
from penstock.tuner.pace import Pace
from penstock.workloads.selection_streams import OverlapStream, streamed
from penstock.workloads.synthetic_kv import SyntheticKV

CONTEXT, STEPS = 800, 5
POLICY = KVSwap(selected_tokens=200, reuse_tokens=400, rank=32, index_bits=8)
FIGURES = StepFigures(
    step_s=10.0, select_s=2.0, stall_s=4.0, reads=1.0, read_bytes=1.0, units_wanted=1.0,
    units_hit=0.0, resident_bytes=1, fill_s=0.1, steps=1, pace_s=0.5, clock_step_s=9.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny: LoadedModel) -> CausalLM:
    return tiny.model


def document(model: CausalLM, batch: int) -> SyntheticKV:
    return SyntheticKV(inspect_model(model).kv, batch, torch.device("cpu"))


@pytest.fixture(scope="module")
def make_work(model: CausalLM, tiny_adapter: LowRankAdapter) -> Callable[..., Workpiece]:
    def make(**fields: Any) -> Workpiece:
        batch = fields.get("batch", 1)
        settings: dict[str, Any] = {
            "adapter": tiny_adapter, "document": document(model, batch), "batch": batch,
            "context": CONTEXT,
        }  # fmt: skip
        return Workpiece(model=model, **{**settings, **fields})

    return make


MakeWork = Callable[..., Workpiece]


def limit_of(work: Workpiece, share: float) -> int:
    full = inspect_model(work.model).kv.full_cache_bytes(work.batch, work.max_tokens)
    return int(full * share)


# Counts -----------------------------------------------------------------------------------------

COUNTED = ("reads", "read_bytes", "units_wanted", "units_hit")


def by_hand(work: Workpiece, policy: SelectionPolicy, store: str, limit: int) -> dict[str, float]:
    """Medians over the steps behind the warm-up, of a cache that this test fills and drives."""
    model = share_weights(work.model)
    chosen = policy if work.stream is None else streamed(policy, work.stream)
    rows: list[dict[str, float]] = []
    with TieredCache(
        model, chosen, limit, store, max_tokens=CONTEXT + 48, batch_size=work.batch,
        adapter=work.adapter if policy.uses_adapter else None,
    ) as cache:  # fmt: skip
        document(work.model, work.batch).fill(cache, CONTEXT)
        token = torch.ones(work.batch, 1, dtype=torch.int64)
        for at in range(CONTEXT, CONTEXT + WARM_STEPS + STEPS):
            before = cache.stats.decode.as_dict()
            with torch.no_grad():
                logits = model(
                    token,
                    **cache_argument(model, cache),
                    position_ids=torch.full((work.batch, 1), at),
                ).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            after = cache.stats.decode.as_dict()
            rows.append({name: after[name] - before[name] for name in COUNTED})
        assert cache.report().used_bytes <= cache.plan.total_bytes
        resident = cache.plan.total_bytes
    counted = {name: median(row[name] for row in rows[WARM_STEPS:]) for name in COUNTED}
    return counted | {"resident_bytes": resident}


@pytest.mark.parametrize(
    ("policy", "share", "batch", "store", "stream"),
    [
        (POLICY, 0.6, 1, "memory", None),
        (replace(POLICY, reuse_tokens=0, group_tokens=8), 0.5, 3, "nvme", None),
        (POLICY, 0.6, 2, "memory", OverlapStream(overlap=0.8)),
        (FlexGen(), 0.4, 1, "nvme", None),
        (Quest(), 0.6, 1, "memory", None),
    ],
    ids=["kvswap", "no reuse, batch", "stream", "flexgen", "rows that are heads"],
)  # fmt: skip
def test_counts_are_the_caches_own(
    make_work: MakeWork, policy: SelectionPolicy, share: float, batch: int, store: str,
    stream: OverlapStream | None,
) -> None:  # fmt: skip
    work = make_work(batch=batch, stream=stream)
    limit = limit_of(work, share)
    expected = by_hand(work, policy, store, limit)
    with EngineRun(work, policy, store=store, limit_bytes=limit) as run:
        run.decode(STEPS)
        found = run.figures()
        assert run.plan.total_bytes == found.resident_bytes <= limit
        assert run._cache.report().used_bytes <= found.resident_bytes
        total = run._cache.stats.decode
        assert total.steps == WARM_STEPS + STEPS
    assert {name: as_dict(found)[name] for name in expected} == expected
    assert found.steps == STEPS
    assert found.reads > 0
    assert 0 <= found.select_s + found.stall_s <= found.step_s
    assert found.block_s == pytest.approx(found.step_s - found.select_s - found.stall_s)
    assert found.fill_s > 0


def test_a_streams_overlap_is_the_hit_rate(make_work: MakeWork) -> None:
    one_selection = replace(POLICY, reuse_tokens=200)
    for overlap in (0.3, 0.9):
        work = make_work(stream=OverlapStream(overlap=overlap))
        limit = limit_of(work, 0.6)
        with EngineRun(work, one_selection, store="memory", limit_bytes=limit) as run:
            run.decode(8)
            assert run.figures().hit_rate == pytest.approx(overlap, abs=0.05)


def test_several_run_side_by_side_and_the_model_stays_as_it_was(make_work: MakeWork) -> None:
    work = make_work()
    token = torch.tensor([[5, 6, 7]])
    before = work.model(token).logits
    alone = [by_hand(work, each, "memory", limit_of(work, 0.6)) for each in (POLICY, Quest())]
    work = make_work()
    with (
        EngineRun(work, POLICY, store="memory", limit_bytes=limit_of(work, 0.6)) as one,
        EngineRun(
            replace(work, document=document(work.model, 1)), Quest(), store="memory",
            limit_bytes=limit_of(work, 0.6),
        ) as two,
    ):  # fmt: skip
        assert torch.equal(work.model(token).logits, before)
        figures = run_together([one, two], steps=STEPS, rounds=1)
    for found, expected in zip(figures, alone, strict=True):
        assert {name: as_dict(found)[name] for name in expected} == expected
    assert torch.equal(work.model(token).logits, before)


# Times ------------------------------------------------------------------------------------------


class Scripted(EngineRun):
    """Decodes in no time and says that it took what the script says."""

    script: Iterator[float] = iter(())
    taken = 0

    def _step(self) -> dict[str, float]:
        self.taken += 1
        took = next(self.script)
        names = ("predict_s", "stall_s", "reads", "read_bytes", "units_wanted", "units_hit")
        self._position += 1
        return {name: took * (i + 2) for i, name in enumerate(names)} | {"step_s": took}


def scripted(work: Workpiece, times: Sequence[float], warm: int = WARM_STEPS) -> Scripted:
    class Made(Scripted):
        script = iter([*[1e-3] * warm, *times])

    limit = limit_of(work, 0.6)
    return Made(work, POLICY, store="memory", limit_bytes=limit)


def at_paces(run: EngineRun, paces: Sequence[float]) -> EngineRun:
    """The run with what `Pace` says before and behind its rounds, in seconds."""
    said = iter(paces)
    run._pace = lambda: next(said)  # type: ignore[assignment]
    return run


def test_medians_of_all_steps_at_one_pace(make_work: MakeWork) -> None:
    """The machine is half as fast in the first round, and turns so in the second."""
    rounds = [[4.0, 2.4, 6.4], [3.0, 1.8, 4.8], [1.0, 3.2, 2.0]]
    run = scripted(make_work(), [t / 100 for r in rounds for t in r])
    with at_paces(run, [2.0, 2.0, 1.0, 2.0, 1.0, 1.0]):
        for _ in rounds:
            run.decode(3)
        found = run.figures()
    assert found.pace_s == 1.5
    # The script has a wait of three steps in each step, which no pace changes; ranking takes two.
    steps = [t / 100 for r in rounds for t in r]
    shares = [0.75] * 3 + [1.0] * 3 + [1.5] * 3
    assert found.stall_s == pytest.approx(3 * sorted(steps)[4])
    assert found.step_s == pytest.approx(found.stall_s), "waiting is all there is"
    ranked = sorted(2 * step * share for step, share in zip(steps, shares, strict=True))
    assert found.select_s == pytest.approx(ranked[4])
    assert found.clock_step_s == pytest.approx(sorted(steps)[4])
    assert found.reads == pytest.approx(4 * sorted(steps)[4])
    assert found.hit_rate == pytest.approx(7 / 6)
    assert found.steps == 9
    assert found.block_s == 0, "never below zero"


def test_all_but_the_wait_goes_by_the_pace() -> None:
    faster = FIGURES.at(0.25)
    assert (faster.step_s, faster.select_s, faster.stall_s) == (7.0, 1.0, 4.0)
    assert (faster.pace_s, faster.clock_step_s) == (0.25, 9.0)
    assert faster.at(0.5) == FIGURES
    unknown = replace(FIGURES, pace_s=0.0)
    assert unknown.at(0.25) is unknown
    assert FIGURES.at(0.0) is FIGURES
    twice = replace(FIGURES, step_s=16.0, select_s=4.0, pace_s=1.0)
    one, other, left = at_one_pace([FIGURES, twice, unknown])
    assert one.step_s == other.step_s == pytest.approx(13.0)
    assert left is unknown


def test_the_pace_is_that_of_the_models_own_forward(make_work: MakeWork) -> None:
    model = make_work().model
    times = iter([0.0, 0.009, 1.0, 1.003, 2.0, 2.009, 3.0, 3.007])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.tuner.pace.time.perf_counter", lambda: next(times))
        assert Pace(model)() == pytest.approx(0.009)
    assert next(times) == 3.0, "0.021 seconds were enough"
    assert Pace(model)() > 0


def test_slow_steps_end_a_round_and_the_warm_up(make_work: MakeWork) -> None:
    times = [1.5, *[SLOW_ROUND_S / 2 - 0.1] * 9]
    run = scripted(make_work(), times, warm=0)
    with run:
        assert run.taken == 1, "a step of 1.5 seconds warms up enough"
        run.decode(9)
        assert run.taken == 1 + 3
        assert run.figures().steps == 3


def test_no_step_beyond_the_room(make_work: MakeWork) -> None:
    work = make_work(new_tokens=10, document=document(make_work().model, 1))
    with EngineRun(work, POLICY, store="memory", limit_bytes=limit_of(work, 0.6)) as run:
        for _ in range(3):
            run.decode(4)
        assert run.figures().steps == 10 - WARM_STEPS


def test_turns_are_taken_forwards_and_backwards() -> None:
    order: list[str] = []

    class Turn:
        def __init__(self, name: str) -> None:
            self.name = name

        def decode(self, steps: int) -> None:
            order.append(f"{self.name}{steps}")

        def figures(self) -> StepFigures:
            return replace(FIGURES, reads=float(ord(self.name)))

    runs: Any = [Turn(name) for name in "abc"]
    figures = run_together(runs, steps=3, rounds=3)
    assert [chr(int(each.reads)) for each in figures] == ["a", "b", "c"]
    assert order == ["a3", "b3", "c3", "c3", "b3", "a3", "a3", "b3", "c3"]
    assert run_together([]) == []


# Ends -------------------------------------------------------------------------------------------


class Broken:
    """A document that cannot be read."""

    def fill(self, cache: Any, tokens: int, progress: Any = None) -> None:
        cache.tiers.append(0, *[torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)] * 2)
        raise OSError("the text is gone")


def test_a_failed_start_leaves_nothing(
    make_work: MakeWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TieredCache] = []
    close = TieredCache.close

    def noted(self: TieredCache) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(TieredCache, "close", noted)
    work = make_work(document=Broken())
    with pytest.raises(OSError, match="the text is gone") as caught:
        EngineRun(work, POLICY, store=str(tmp_path), limit_bytes=limit_of(work, 0.6))
    assert len(closed) == 1, "while the traceback still holds everything"
    del caught
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BudgetError, match="too little"):
        EngineRun(work, POLICY, store=str(tmp_path), limit_bytes=5000)


def test_figures_as_plain_data() -> None:
    figures = StepFigures(
        step_s=1.0, select_s=0.25, stall_s=0.5, reads=3.0, read_bytes=4.0, units_wanted=0.0,
        units_hit=0.0, resident_bytes=7, fill_s=8.0, steps=9,
    )  # fmt: skip
    assert StepFigures(**as_dict(figures)) == figures
    assert figures.block_s == 0.25
    assert figures.hit_rate == 1.0
    assert replace(figures, units_wanted=4.0, units_hit=1.0).hit_rate == 0.25
