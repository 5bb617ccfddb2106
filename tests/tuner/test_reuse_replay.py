"""Reuse rates replayed from a recording, against what the engine counts with so many slots."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from penstock.methods import KVSwap
from penstock.methods.baselines.loki import Loki
from penstock.models.loader import LoadedModel, load
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.fidelity import Reference
from penstock.tuner.reuse_replay import reuse_rates
from penstock.workloads.recorded_stream import Recording

FORCED = 12
POLICY = KVSwap(selected_tokens=120, reuse_tokens=120, rank=32, index_bits=8, attend="selected")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("recall")


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> list[Tensor]:
    return [text[-640:] for text in calibration_tokens(loaded, [], tokens=1024, forced=FORCED)[:2]]


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel, texts: list[Tensor]) -> Reference:
    return Reference(loaded.model, texts, forced=FORCED)


@pytest.fixture(scope="module")
def single(loaded: LoadedModel, texts: list[Tensor]) -> Reference:
    return Reference(loaded.model, texts[:1], forced=FORCED)


@pytest.fixture(scope="module")
def recordings(reference: Reference) -> tuple[Recording, ...]:
    return reference.measure(POLICY, memory=None, record=True).selections


@pytest.mark.slow
def test_the_engine_counts_the_same(
    reference: Reference, recordings: tuple[Recording, ...]
) -> None:
    """What it attends to does not depend on the slots but for the order of a sum, whose rounding
    may change a selection here and there."""
    capacity = 480
    counted = reference.measure(replace(POLICY, reuse_tokens=capacity), memory=None)
    rates = reuse_rates(recordings, [capacity])
    assert rates[capacity] == pytest.approx(counted.hit_rate, abs=0.005)
    assert 0.05 < rates[capacity] < 1


def test_one_recording_is_replayed_exactly(single: Reference) -> None:
    """The same run's own count: nothing but the replay can differ."""
    found = single.measure(replace(POLICY, reuse_tokens=180), memory=None, record=True)
    assert reuse_rates(found.selections, [180])[180] == pytest.approx(found.hit_rate, abs=1e-12)


def test_rows_that_are_heads(single: Reference) -> None:
    found = single.measure(Loki(selected_tokens=64), memory="1/2", record=True)
    [recording] = found.selections
    assert recording.shares.shape[2] == 4
    assert reuse_rates([recording], [64])[64] > 0


def test_more_slots_have_more(recordings: tuple[Recording, ...]) -> None:
    rates = reuse_rates(recordings, (0, 119, 120, 240, 2000))
    assert list(rates) == [0, 119, 120, 240, 2000]
    assert rates[0] == rates[119] == 0, "less than a selection: no slots of a layer's own"
    assert 0 < rates[120] < rates[240] < rates[2000]
    each = [reuse_rates([recording], [240])[240] for recording in recordings]
    assert min(each) <= rates[240] <= max(each)
    assert reuse_rates([], [100]) == {100: 0.0}


def recording(units: NDArray[np.int64]) -> Recording:
    """One layer and one row. units: [steps, wanted], -1 for none"""
    shares = np.where(units < 0, np.nan, units * 4 / 400).astype(np.float32)
    return Recording(shares=shares[:, None, None], context=400, group_tokens=4)


def test_by_hand() -> None:
    steps = np.array([[0, 1], [1, 2], [0, 2], [3, -1], [-1, -1], [1, 3]])
    # Two slots: 0 and 1 miss; 1 hits, 2 takes 0's; 0 takes 1's, 2 hits; 3 takes 2's, whose turn it
    # is; then 3 hits and 1 takes 0's.
    # Three: 0, 1 and 2 fill them; only 3 takes one, the oldest.
    rates = reuse_rates([recording(steps)], [4, 8, 12])
    assert rates == pytest.approx({4: 0, 8: 3 / 9, 12: 5 / 9})
    assert reuse_rates([recording(np.full((2, 2), -1))], [8]) == {8: 0}
