"""The size of HillInfer's hot pool: solved from measured rates, and moved only where it pays."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from penstock.methods.hillinfer.index import Measured
from penstock.methods.hillinfer.near_storage.scorer import LocalScorer
from penstock.methods.hillinfer.near_storage.settings import ScoreSettings
from penstock.methods.hillinfer.near_work import SETTLED_STEPS, NearWork

LAYERS, TOKENS, SLOTS, SELECTED = 2, 1000, 800, 100


@pytest.fixture
def work() -> Iterator[NearWork]:
    settings = ScoreSettings(
        rows=1, max_tokens=TOKENS, query_heads=2, kv_heads=1, head_dim=16, dtype="float32",
        scaling=0.25,
    )  # fmt: skip
    made = NearWork(
        LocalScorer(settings, LAYERS), layers=LAYERS, most_hot=SLOTS, least_hot=SELECTED, fixed=None
    )
    yield made
    made.close()


def note(work: NearWork, *, host: float, device: float, link: float, times: int) -> None:
    """Steps of all layers at these rates, in tokens per second."""
    for _ in range(times * LAYERS):
        hot = work.capacity
        cold = TOKENS - hot
        measured = Measured(hot, hot / host, cold, cold / device)
        work.note(
            measured, rows=1, selected=SELECTED, selected_hot=SELECTED * hot // TOKENS,
            alpha=SELECTED / TOKENS, link=link,
        )  # fmt: skip


def test_the_thread_works_in_the_stream_of_who_asks(
    work: NearWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for CUDA's streams, of which every thread has its own current one."""
    here = threading.local()
    here.stream = "the caller's"

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        here.stream = stream
        yield
        here.stream = "the default"

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{here.stream} on {device}")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    found = work.run(lambda: str(here.stream), torch.device("cuda", 1))
    assert found.result() == "the caller's on cuda:1"
    assert work.run(lambda: hasattr(here, "other"), torch.device("cpu")).result() is False


def test_everything_that_fits_is_hot_before_the_first_solution(work: NearWork) -> None:
    note(work, host=1e6, device=1e6, link=1e9, times=SETTLED_STEPS - 1)
    assert work.split is None
    assert work.capacity == SLOTS


def test_equal_scorers_share_the_tokens(work: NearWork) -> None:
    note(work, host=1e6, device=1e6, link=1e12, times=SETTLED_STEPS)
    assert work.split is not None
    assert abs(work.capacity - TOKENS // 2) <= TOKENS // 20


def test_a_slow_link_keeps_as_much_as_fits(work: NearWork) -> None:
    note(work, host=1e6, device=1e6, link=1e3, times=SETTLED_STEPS)
    assert work.capacity == SLOTS


def test_rates_that_wander_move_nothing(work: NearWork) -> None:
    note(work, host=1e6, device=1e6, link=1e12, times=SETTLED_STEPS)
    before, random = work.capacity, np.random.default_rng(0)
    for _ in range(20):
        wander = 1e6 * random.uniform(0.95, 1.05)
        note(work, host=wander, device=1e6, link=1e12, times=2)
    assert work.capacity == before


def test_a_device_that_became_slow_is_given_less(work: NearWork) -> None:
    note(work, host=1e6, device=1e6, link=1e12, times=SETTLED_STEPS)
    before = work.capacity
    note(work, host=1e6, device=2e5, link=1e12, times=12 * SETTLED_STEPS)
    assert work.solved > 1
    assert work.capacity > before


def test_rates_and_hits_are_told(work: NearWork) -> None:
    assert (work.rates, work.hot_share) == (None, 0.0)
    note(work, host=1e6, device=2e5, link=1e7, times=SETTLED_STEPS - 1)
    assert work.rates is not None
    assert work.rates.host_scores == pytest.approx(1e6)
    assert work.rates.device_scores == pytest.approx(2e5)
    assert work.hot_share == pytest.approx(SLOTS / TOKENS)
