"""KVSwap's search with the engine itself, on a tiny model in memory."""

from collections.abc import Callable

import pytest

from penstock.models.model_shape import inspect_model
from penstock.tuner import engine_run, kvswap_search, pace
from penstock.tuner.kvswap_search import KVSwapSearch
from penstock.tuner.tuning_task import TuningTask

MakeTask = Callable[..., TuningTask]
STEPS, ROUNDS, FINAL_ROUNDS = 2, 2, 3
POINTS, CHECKS, FINALISTS = 4, 2, 2


def test_what_was_run_is_what_was_wanted(sparse: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_run, "STEPS", STEPS)
    monkeypatch.setattr(kvswap_search, "ROUNDS", ROUNDS)
    monkeypatch.setattr(kvswap_search, "FINAL_ROUNDS", FINAL_ROUNDS)
    monkeypatch.setattr(kvswap_search, "POINTS", POINTS)
    monkeypatch.setattr(kvswap_search, "CHECKS", CHECKS)
    monkeypatch.setattr(kvswap_search, "FINALISTS", FINALISTS)
    monkeypatch.setattr(pace, "_PASSES", 1)
    full = inspect_model(sparse().model).kv.full_cache_bytes(1, 1024)
    task = sparse(max_context=1024, max_batch=1, store="memory", limit_bytes=int(full * 0.7))
    search = KVSwapSearch(task)
    search.spread()
    search.solve()
    [found] = search.found
    assert len(search.runs) == POINTS + CHECKS
    assert task.journal.made == search.measurements == POINTS + CHECKS + FINALISTS
    steps = STEPS * (ROUNDS * len(search.runs) + FINAL_ROUNDS * FINALISTS)
    assert search.decode_steps == steps, "no round was cut short"
    assert found.measured is not None
    for _, policy, work, figures in search.runs:
        assert figures.resident_bytes <= task.limit_bytes
        assert policy.reuse_tokens is not None
        if policy.reuse_tokens == 0:
            assert figures.hit_rate == 0
        else:
            # Slots of one selection hit what the stream repeats; more slots also hit older units.
            assert 0.7 < figures.hit_rate <= 1
            assert work.missing == figures.units_wanted - figures.units_hit
        assert work.reads == figures.reads
        assert figures.read_bytes >= figures.reads * 512
