"""Throttle, in a virtual clock: nothing here is timed, so nothing here is flaky."""

import numpy as np
import pytest

from penstock.devices.presets import EMMC, PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.devices.throttle import Throttle


class VirtualClock:
    """Time that passes only when somebody sleeps; sleeps end late, and looking costs a little."""

    def __init__(self, oversleep_s: float = 0.0, look_s: float = 0.5e-6) -> None:
        self.now = 1000.0
        self.oversleep_s = oversleep_s
        self.look_s = look_s

    def __call__(self) -> float:
        self.now += self.look_s
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (self.oversleep_s if seconds > 0 else 0.0)


def batch(count: int, request_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count) * (8 << 20), np.full(count, request_bytes)


@pytest.mark.parametrize("profile", PRESETS.values(), ids=list(PRESETS))
@pytest.mark.parametrize(
    ("count", "request_bytes"), [(64, 4096), (256, 4096), (64, 16384), (64, 65536), (1, 1 << 20)]
)
def test_closed_loop_takes_the_profiles_time(
    profile: DeviceProfile, count: int, request_bytes: int
) -> None:
    clock = VirtualClock(oversleep_s=60e-6, look_s=0.2e-6)
    throttle = Throttle(profile, clock=clock, sleep=clock.sleep)
    reads = batch(count, request_bytes)
    began, rounds = clock.now, 50
    for _ in range(rounds):
        throttle.hold_until(throttle.start_read(*reads))
    per_batch = (clock.now - began) / rounds
    expected = profile.read_time_s(*reads)
    assert expected <= per_batch <= expected + profile.latency_s + 2e-6


def test_deep_queue_hides_latency() -> None:
    """With the next batch always queued, the device never idles."""
    clock = VirtualClock()
    throttle = Throttle(EMMC, clock=clock, sleep=clock.sleep)
    reads = batch(64, 16384)
    began, rounds = clock.now, 50
    pending = [throttle.start_read(*reads)]
    for _ in range(rounds):
        pending.append(throttle.start_read(*reads))
        throttle.hold_until(pending.pop(0))
    expected = rounds * EMMC.read_time_s(*reads) + EMMC.latency_s
    assert clock.now - began == pytest.approx(expected, abs=100e-6)


def test_compute_overlaps_reads() -> None:
    clock = VirtualClock()
    throttle = Throttle(EMMC, clock=clock, sleep=clock.sleep)
    reads = batch(64, 16384)
    answer_at = throttle.start_read(*reads)
    assert not throttle.is_due(answer_at)
    clock.sleep(EMMC.read_time_s(*reads) / 2)
    throttle.hold_until(answer_at)
    assert clock.now == pytest.approx(answer_at)
    assert throttle.is_due(answer_at)


def test_idle_time_is_not_saved_up() -> None:
    clock = VirtualClock()
    throttle = Throttle(EMMC, clock=clock, sleep=clock.sleep)
    clock.sleep(10)
    reads = batch(64, 16384)
    expected = EMMC.read_time_s(*reads) + EMMC.latency_s
    assert throttle.start_read(*reads) - clock.now == pytest.approx(expected, abs=61e-6)


def test_writes_take_the_device_too() -> None:
    clock = VirtualClock()
    throttle = Throttle(EMMC, clock=clock, sleep=clock.sleep)
    written_at = throttle.start_write(0, 125_000_000)
    assert written_at - clock.now == pytest.approx(1, rel=1e-3)
    assert throttle.start_read(*batch(1, 4096)) > written_at
