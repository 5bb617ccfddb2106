"""The time to the first token, from chunks whose times are planted."""

import time

import pytest

from penstock.tuner import prefill_profile
from penstock.tuner.prefill_profile import PrefillProfile, PrefillWatch

CHUNKS = range(512, 8193, 512)


class Clock:
    """Stands still until it is told."""

    now = 1234.5

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(prefill_profile, "time", made)
    return made


def watched(clock: Clock, linear: float, quadratic: float, noise: float = 0.0) -> PrefillProfile:
    watch, start = PrefillWatch(), clock.now
    for number, tokens in enumerate(CHUNKS):
        exact = linear * tokens + quadratic * tokens**2
        clock.now = start + exact * (1 + noise * (-1) ** number)
        watch(tokens)
    return watch.profile()


@pytest.mark.parametrize(
    ("linear", "quadratic"), [(2e-4, 3e-8), (1e-5, 5e-8), (5e-4, 1e-10), (1e-6, 0.0), (0.0, 1e-7)]
)
def test_a_planted_curve_comes_back(clock: Clock, linear: float, quadratic: float) -> None:
    found = watched(clock, linear, quadratic)
    assert found.linear >= 0
    assert found.quadratic >= 0
    for tokens in (300, 8192, 32768):
        expected = linear * tokens + quadratic * tokens**2
        assert found.seconds(1, tokens) == pytest.approx(expected, rel=0.02)
        assert found.seconds(3, tokens) == pytest.approx(3 * found.seconds(1, tokens))


def test_noise_does_not_bend_it(clock: Clock) -> None:
    found = watched(clock, 2e-4, 3e-8, noise=0.03)
    assert found.seconds(1, 32768) == pytest.approx(2e-4 * 32768 + 3e-8 * 32768**2, rel=0.1)


def test_a_curve_that_bends_the_other_way_stays_a_line(clock: Clock) -> None:
    """The first chunk pays for warming up; the fit does not foretell negative times."""
    watch, start = PrefillWatch(), clock.now
    for tokens in CHUNKS:
        clock.now = start + 0.5 + 1e-4 * tokens
        watch(tokens)
    found = watch.profile()
    assert found.quadratic == 0
    assert found.linear > 1e-4


def test_one_chunk_is_enough(clock: Clock) -> None:
    watch = PrefillWatch()
    clock.now += 0.75
    watch(1000)
    assert watch.profile().seconds(1, 1000) == pytest.approx(0.75, rel=1e-3)


def test_only_the_first_prompt_counts_where_others_followed(clock: Clock) -> None:
    """Each prompt begins with short attention again: its chunks are not the first one's."""
    watch, start = PrefillWatch(), clock.now
    for tokens in range(1024, 4097, 1024):
        clock.now = start + 1e-8 * tokens**2
        watch(tokens)
    first = clock.now
    for tokens in range(1024, 2049, 1024):
        clock.now = first + 1e-8 * tokens**2
        watch(4096 + tokens)
    found = watch.profile(4096 + 32)
    assert found.quadratic == pytest.approx(1e-8, rel=0.01)
    assert found.seconds(1, 4096) == pytest.approx(1e-8 * 4096**2, rel=0.01)
    assert watch.profile().seconds(1, 8192) < 0.9 * found.seconds(1, 8192)


def test_the_slower_of_model_and_disk_counts() -> None:
    profile = PrefillProfile(1e-3, 0.0)
    behind = profile.first_token_s(2, 1000, written_bytes=10**6, write_bandwidth=1e6)
    assert behind == pytest.approx(2.0)
    late = profile.first_token_s(2, 1000, written_bytes=5 * 10**6, write_bandwidth=1e6)
    assert late == pytest.approx(5.0)


def test_others_are_told_too_and_real_time_passes() -> None:
    seen: list[int] = []
    watch = PrefillWatch(then=seen.append)
    for tokens in (100, 200):
        time.sleep(0.02)
        watch(tokens)
    assert seen == [100, 200]
    assert watch.profile().seconds(1, 200) >= 0.03
