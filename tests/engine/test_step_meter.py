"""StepMeter: time that no step had is counted to none."""

import itertools
import time

import pytest

from penstock.core.stats import RunStats
from penstock.engine.step_meter import StepMeter


def test_a_step_that_failed_takes_no_time_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(1)
    monkeypatch.setattr(
        time, "perf_counter", lambda: float(next(seconds))
    )  # one each time it is read
    stats = RunStats()
    meter = StepMeter(stats, None)
    meter.begin(5, decoding=False)
    meter.leave(5)
    meter.begin(1, decoding=True)
    meter.end()  # an error came before the last layer was done
    assert stats.decode.seconds == 0
    meter.begin(1, decoding=True)
    meter.leave(1)
    meter.end()
    assert (stats.prefill.seconds, stats.decode.seconds) == (2, 1)  # to the next step, to its end
