"""Eq. 2 to 4: both sides take equal time unless a bound holds; rates that drift are noticed."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.methods.hillinfer.work_split import Rates, RateWatch, Split, balance, solve

RATE = st.floats(1e3, 1e9)
ALPHA = st.floats(0.0, 1.0)
RATES = st.builds(
    Rates, host_scores=RATE, device_scores=RATE, host_link=RATE | st.just(math.inf),
    device_link=RATE | st.just(math.inf),
)  # fmt: skip
FINITE = st.builds(Rates, host_scores=RATE, device_scores=RATE, host_link=RATE, device_link=RATE)
HAND = Rates(host_scores=100, device_scores=10, host_link=40, device_link=20)
"""A token takes the host 10 ms and 25 to send, the device 100 ms and 50."""


def one_token_s(rates: Rates) -> float:
    found: float = sum(1 / getattr(rates, field.name) for field in fields(rates))
    return found


# Eq. 4 --------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    # alpha 0.4: host 10 + 0.4 * 25 = 20 ms a token, device 100 + 0.4 * 50 = 120 ms.
    assert balance(HAND, 0.4) == pytest.approx(6)
    assert balance(HAND, 0.4, crosses_host_link=True) == pytest.approx(6.5)
    split = solve(HAND, 0.4, 70, 70)
    assert (split.hot_tokens, split.cold_tokens) == (60, 10)
    assert split.beta == 6
    assert split.host_s == pytest.approx(1.2)
    assert split.device_s == pytest.approx(1.2)
    assert split.step_s == pytest.approx(1.2)


@given(rates=FINITE, alpha=ALPHA)
def test_the_papers_formula_follows_and_its_figures_does_not(rates: Rates, alpha: float) -> None:
    f_c, f_s, b_c, b_s = (getattr(rates, field.name) for field in fields(rates))
    below = b_s * f_s * (b_c + alpha * f_c)
    eq4 = b_c * f_c * (b_s + alpha * f_s) / below
    of_16b = f_c * (b_s * b_c + alpha * b_c * f_s + alpha * b_s * f_s) / below
    assert balance(rates, alpha) == pytest.approx(eq4)
    assert balance(rates, alpha, crosses_host_link=True) == pytest.approx(of_16b)
    # Eq. 2, put in: equal for Eq. 4.
    assert eq4 / f_c + alpha * eq4 / b_c == pytest.approx(1 / f_s + alpha / b_s)


@given(rates=RATES, alpha=ALPHA, total=st.integers(0, 10**6), limit=st.integers(0, 10**6),
       share=st.none() | ALPHA, crosses=st.booleans())  # fmt: skip
def test_equal_times_or_a_bound(
    rates: Rates, alpha: float, total: int, limit: int, share: float | None, crosses: bool
) -> None:
    split = solve(rates, alpha, total, limit, share, crosses_host_link=crosses)
    most = min(total, limit)
    assert split.hot_tokens + split.cold_tokens == total
    assert 0 <= split.hot_tokens <= most
    apart = abs(split.host_s - split.device_s)
    slack = 3 * one_token_s(rates) + 1e-9 * (split.host_s + split.device_s)
    if apart > slack:
        bound = most if split.host_s < split.device_s else 0
        assert split.hot_tokens == bound
    elif share is None and 0 < split.hot_tokens < most and split.cold_tokens > 100:
        wanted = balance(rates, alpha, crosses_host_link=crosses) * split.cold_tokens
        around = balance(rates, alpha, crosses_host_link=crosses) + 1
        assert abs(split.hot_tokens - wanted) <= around * (1 + 1e-6)


@given(rates=RATES, alpha=ALPHA, total=st.integers(1, 10**6), name=st.sampled_from(fields(Rates)),
       factor=st.floats(1.0, 100.0), share=st.none() | ALPHA)  # fmt: skip
def test_monotone_in_every_rate(
    rates: Rates, alpha: float, total: int, name: Any, factor: float, share: float | None
) -> None:
    faster = replace(rates, **{name.name: getattr(rates, name.name) * factor})
    before = solve(rates, alpha, total, total, share, seen_hot_tokens=total // 3)
    after = solve(faster, alpha, total, total, share, seen_hot_tokens=total // 3)
    if name.name.startswith("host"):
        assert after.hot_tokens >= before.hot_tokens
    else:
        assert after.hot_tokens <= before.hot_tokens
    assert after.step_s <= before.step_s * (1 + 1e-12)


# Skewness -----------------------------------------------------------------------------------------


def test_skew_moves_work_to_the_device() -> None:
    plain = solve(HAND, 0.4, 70, 70)
    # Of 28 selected 27 were among 50 hot: 0.54 of those, 0.05 of the cold. Host 10 + 0.54 * 25 =
    # 23.5 ms a token, device 100 + 0.05 * 50 = 102.5 ms: 56.94 of 70.
    skewed = solve(HAND, 0.4, 70, 70, 27 / 28, seen_hot_tokens=50)
    assert balance(HAND, 0.54, 0.05) == pytest.approx(102.5 / 23.5)
    assert skewed.hot_tokens == 57
    assert skewed.host_s == pytest.approx(57 * 0.0235)
    assert skewed.device_s == pytest.approx(13 * 0.1025)
    assert skewed.hot_tokens < plain.hot_tokens


@given(rates=RATES, alpha=ALPHA, total=st.integers(1, 10**6), seen=st.integers(0, 10**6))
def test_no_skew_is_eq_2(rates: Rates, alpha: float, total: int, seen: int) -> None:
    seen = min(seen, total)
    plain = solve(rates, alpha, total, total)
    same = solve(rates, alpha, total, total, seen / total, seen_hot_tokens=seen)
    assert abs(same.hot_tokens - plain.hot_tokens) <= 1
    assert same.step_s == pytest.approx(plain.step_s, rel=1e-6, abs=2 * one_token_s(rates))


def test_where_nothing_else_is_said_the_pool_was_as_large_as_it_may_be() -> None:
    told = solve(HAND, 0.4, 70, 62, 0.95, seen_hot_tokens=62)
    assert solve(HAND, 0.4, 70, 62, 0.95) == told
    assert told != solve(HAND, 0.4, 70, 62, 0.95, seen_hot_tokens=50)
    # A pool that held all, or nothing, says nothing of the other.
    assert solve(HAND, 0.4, 70, 70, 1.0) == solve(HAND, 0.4, 70, 70)
    assert solve(HAND, 0.4, 70, 70, 0.0, seen_hot_tokens=0) == solve(HAND, 0.4, 70, 70)


@given(rates=RATES, alpha=st.floats(0.05, 0.3), power=st.floats(0.3, 1.0), start=st.floats(0, 1))
def test_solving_again_settles(rates: Rates, alpha: float, power: float, start: float) -> None:
    """A pool's share of the selected is a power of its share of the tokens, and no more than it
    holds."""
    total, hot = 100_000, int(100_000 * start)
    for _ in range(60):
        share = min((hot / total) ** power, hot / total / alpha)
        hot = (hot + solve(rates, alpha, total, total, share, seen_hot_tokens=hot).hot_tokens) // 2
    share = min((hot / total) ** power, hot / total / alpha)
    again = solve(rates, alpha, total, total, share, seen_hot_tokens=hot)
    assert abs(again.hot_tokens - hot) <= 0.01 * total
    cold = total - hot
    if cold and hot:
        host = hot / rates.host_scores + share * alpha * total / rates.host_link
        device = cold / rates.device_scores + (1 - share) * alpha * total / rates.device_link
        if 0.02 * total < hot < 0.98 * total:
            assert host == pytest.approx(device, rel=0.2)


# Bounds -------------------------------------------------------------------------------------------


def test_the_hosts_memory_binds() -> None:
    split = solve(HAND, 0.4, 70, 33)
    assert (split.hot_tokens, split.cold_tokens) == (33, 37)
    assert split.host_s < split.device_s == split.step_s
    assert solve(HAND, 0.4, 70, 0).beta == 0
    assert solve(HAND, 0.4, 0, 50) == Split(
        hot_tokens=0, cold_tokens=0, host_s=0, device_s=0, step_s=0
    )
    assert solve(HAND, 0.4, 70, 70, min_hot_tokens=65).hot_tokens == 65
    assert solve(HAND, 0.4, 70, 33, min_hot_tokens=65).hot_tokens == 33


def test_a_device_that_takes_no_time_gets_all() -> None:
    split = solve(replace(HAND, device_scores=math.inf, device_link=math.inf), 0.4, 70, 70)
    assert (split.hot_tokens, split.step_s) == (0, 0)
    assert balance(replace(HAND, device_scores=math.inf, device_link=math.inf), 0.4) == 0


def test_one_that_does_nothing_gets_what_the_host_has_no_room_for() -> None:
    dead = replace(HAND, device_scores=0)
    assert solve(dead, 0.4, 70, 70).hot_tokens == 70
    assert solve(dead, 0.4, 70, 70).beta == math.inf
    short = solve(dead, 0.4, 70, 50)
    assert (short.hot_tokens, short.step_s) == (50, math.inf)
    assert solve(replace(HAND, host_scores=0), 0.4, 70, 70).hot_tokens == 0
    assert balance(dead, 0.4) == math.inf
    # A host that attends in place sends nothing.
    assert solve(replace(HAND, host_link=math.inf), 0.4, 130, 130).hot_tokens == 120


@pytest.mark.parametrize(
    ("change", "match"),
    [({"alpha": 1.1}, "alpha"), ({"share": -0.1}, "share"), ({"total": -1}, "negative"),
     ({"limit": -1}, "negative"), ({"alpha": math.nan}, "alpha")],
)  # fmt: skip
def test_impossible_settings(change: dict[str, Any], match: str) -> None:
    given_ = {"alpha": 0.2, "share": None, "total": 10, "limit": 10, **change}
    with pytest.raises(ConfigError, match=match):
        solve(HAND, given_["alpha"], given_["total"], given_["limit"], given_["share"])


@pytest.mark.parametrize("rate", [-1.0, math.nan])
def test_what_is_no_rate(rate: float) -> None:
    with pytest.raises(ConfigError, match="device_scores"):
        replace(HAND, device_scores=rate)


# One selection over both --------------------------------------------------------------------------


@given(rates=RATES, alpha=ALPHA, total=st.integers(0, 60), share=st.none() | ALPHA,
       crosses=st.booleans(), limit=st.integers(0, 60))  # fmt: skip
def test_a_joint_selection_takes_the_best_of_all_splits(
    rates: Rates, alpha: float, total: int, share: float | None, crosses: bool, limit: int
) -> None:
    seen = total // 2
    best = min(
        solve(rates, alpha, total, hot, share, min_hot_tokens=hot, crosses_host_link=crosses,
              selects_jointly=True, seen_hot_tokens=seen).step_s
        for hot in range(min(total, limit) + 1)
    )  # fmt: skip
    found = solve(
        rates, alpha, total, limit, share, crosses_host_link=crosses, selects_jointly=True,
        seen_hot_tokens=seen,
    )  # fmt: skip
    assert found.step_s == pytest.approx(best, rel=1e-9)
    apart = solve(
        rates, alpha, total, limit, share, crosses_host_link=crosses, seen_hot_tokens=seen
    )
    assert found.step_s >= apart.step_s * (1 - 1e-12), "waiting is never free"


def test_eq_4_is_not_the_best_of_a_joint_selection() -> None:
    # Hot 10/11 of 110: both score 1 s; sending 40 * 25 ms against 4 * 50 ms.
    joint = solve(HAND, 0.4, 110, 110, selects_jointly=True)
    assert joint.hot_tokens == 100
    assert joint.step_s == pytest.approx(2.0)
    there = solve(HAND, 0.4, 110, 94, selects_jointly=True)
    assert there.hot_tokens == 94
    assert there.step_s == pytest.approx(1.6 + 0.94)


# Watching -----------------------------------------------------------------------------------------


def test_means_are_of_seconds_per_token() -> None:
    watch = RateWatch(HAND, smoothing=0.5)
    watch.note("device_scores", 300, 10.0)  # 30 a second: 33.3 ms beside 100 ms
    assert watch.rates.device_scores == pytest.approx(15)
    assert watch.rates.host_scores == 100
    watch.note("device_scores", 0, 1.0)
    watch.note("device_scores", 5, 0.0)
    assert watch.rates.device_scores == pytest.approx(15)


@given(times=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=30))
def test_a_mean_lies_among_what_was_measured(times: list[float]) -> None:
    watch = RateWatch(replace(HAND, host_link=math.inf))
    for seconds in times:
        watch.note("host_link", 10, seconds)
    rate = watch.rates.host_link
    assert 10 / max(times) * (1 - 1e-9) <= rate <= 10 / min(times) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rate", "moved"), [(12.4, False), (7.6, False), (12.6, True), (7.4, True)]
)
def test_a_quarter_is_drift(rate: float, moved: bool) -> None:
    watch = RateWatch(HAND, smoothing=1.0)
    assert not watch.drifted()
    watch.note("device_scores", 1, 1 / rate)
    assert watch.drifted() is moved
    watch.solved()
    assert not watch.drifted()


@pytest.mark.parametrize("start", [0.0, math.inf])
def test_a_first_measurement_is_drift(start: float) -> None:
    watch = RateWatch(replace(HAND, device_link=start), smoothing=0.1)
    watch.note("device_link", 20, 1.0)
    assert watch.rates.device_link == 20
    assert watch.drifted()


def test_drift_adds_up_over_small_steps() -> None:
    watch = RateWatch(HAND, smoothing=0.2)
    steps = 0
    while not watch.drifted():
        watch.note("host_scores", 50, 1.0)
        steps += 1
    assert 1 < steps < 10
    assert watch.rates.host_scores < 75


@pytest.mark.parametrize("options", [{"smoothing": 0.0}, {"smoothing": 1.5}, {"drift": 0.0}])
def test_a_watch_that_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RateWatch(HAND, **options)
