"""StepMeter: time that no step had is counted to none."""

import time

from penstock.core.stats import RunStats
from penstock.runtime.step_meter import StepMeter


def test_a_step_that_failed_takes_no_time_from_others() -> None:
    stats = RunStats()
    meter = StepMeter(stats, None)
    meter.begin(5, decoding=False)
    meter.leave(5)
    meter.begin(1, decoding=True)
    time.sleep(0.001)
    meter.end()  # an error came before the last layer was done
    assert stats.decode.seconds == 0
    meter.begin(1, decoding=True)
    meter.leave(1)
    meter.end()
    assert stats.decode.seconds >= 0
    assert stats.prefill.seconds > 0
