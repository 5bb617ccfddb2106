"""solve(): how many tokens the host keeps and scores, and how many the device; RateWatch.

Source: HillInfer section 4.3, Eq. 2 to 4. A side's time is what it scores plus what it then sends:

    T_host = M_c / f_c + selected_hot / B_c          M_c tokens hot, M_s = M - M_c cold
    T_device = M_s / f_s + selected_cold / B_s

With selected_hot = alpha M_c and selected_cold = alpha M_s (Eq. 2), equal times give

    beta = M_c / M_s = B_c f_c (B_s + alpha f_s) / (B_s f_s (B_c + alpha f_c))

which is the paper's Eq. 4, and `balance`. The formula beside its figure 16b has one term more,
alpha f_c B_s f_s in the numerator. It does not follow from Eq. 2; it does when what the device
sends crosses the host's link as well, one after the other: T_device = M_s / f_s + alpha M_s / B_s +
alpha M_s / B_c. `crosses_host_link` is that.

Skewness: what is observed is the share of the selected that was hot, under the pools of the moment.
Eq. 2 then holds with alpha_c = share alpha M / M_c and alpha_s = (1 - share) alpha M / M_s of those
pools in the place of alpha. They change with the pools, slowly. Solving again with what was
observed under the new split ends where both agree.

Departure: neither formula knows that the top tokens are those of both pools, so that nothing can be
sent before both have scored. `selects_jointly` minimises max(scoring) + max(sending) instead, of
which Eq. 4 is not the minimum.
"""

import math
from dataclasses import dataclass, fields, replace

from penstock.core.errors import ConfigError

DRIFT = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What both sides do, in tokens per second; infinite for what takes no time, 0 for nothing."""

    host_scores: float
    """f_c: tokens that the host scores."""
    device_scores: float
    """f_s: tokens that the device scores."""
    host_link: float = math.inf
    """B_c: tokens from host memory to where attention runs; infinite where that is the host."""
    device_link: float = math.inf
    """B_s: tokens from the device to the host."""

    def __post_init__(self) -> None:
        """Refuse what is no rate.

        Raises:
            ConfigError: a rate is negative or not a number.
        """
        for field in fields(self):
            rate = getattr(self, field.name)
            if not rate >= 0:
                raise ConfigError(f"{field.name} must be 0 tokens per second or more, not {rate}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Tokens on either side, and what an evaluation with its fetch then takes, in seconds."""

    hot_tokens: int
    cold_tokens: int
    host_s: float
    device_s: float
    step_s: float
    """Until both are done: the longer of the two, and more where they wait for each other."""

    @property
    def beta(self) -> float:
        """Hot tokens per cold token; infinite where nothing is cold."""
        return self.hot_tokens / self.cold_tokens if self.cold_tokens else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Something of the hot and of the cold pool."""

    hot: float
    cold: float


def balance(
    rates: Rates, alpha: float, cold_alpha: float | None = None, *, crosses_host_link: bool = False
) -> float:
    """Eq. 4: the beta at which both sides take equal time, whatever the host has room for.

    Args:
        alpha: share of the hot tokens that is selected.
        cold_alpha: of the cold ones; None: the same.
        crosses_host_link: the formula of the paper's figure 16b.
    """
    cold_alpha = alpha if cold_alpha is None else cold_alpha
    alphas = _Pair(hot=alpha, cold=cold_alpha)
    scores, sending = _token_s(rates, alphas, crosses_host_link)
    return _ratio(scores.hot + sending.hot, scores.cold + sending.cold)


def solve(
    rates: Rates, alpha: float, total_tokens: int, max_hot_tokens: int,
    hot_share_of_selected: float | None = None, *, seen_hot_tokens: int | None = None,
    min_hot_tokens: int = 0, crosses_host_link: bool = False, selects_jointly: bool = False,
) -> Split:  # fmt: skip
    """The split that takes the least time, in whole tokens; of equals the one with more hot ones.

    With none of the options both sides take equal time (to a token's), unless a bound holds. A
    device of rate 0 gets what the host has no room for, and the split then takes for ever.

    Args:
        alpha: share of the tokens that is selected, 0 to 1.
        total_tokens: M, of one row or of all, as the rates count them.
        max_hot_tokens: M_0.
        hot_share_of_selected: observed; None is alpha of each pool, as in Eq. 2.
        seen_hot_tokens: M_c under which that was observed; None: M_0, with which a run begins.
        min_hot_tokens: pinned, or needed as slots for what is selected; M_0 goes before it.

    Raises:
        ConfigError: a share is not between 0 and 1, or a count is negative.
    """
    share = hot_share_of_selected
    if not 0 <= alpha <= 1 or not (share is None or 0 <= share <= 1):
        raise ConfigError(
            f"alpha ({alpha}) and hot_share_of_selected ({share}) must be between 0 and 1"
        )
    if min(total_tokens, max_hot_tokens, min_hot_tokens, seen_hot_tokens or 0) < 0:
        raise ConfigError(
            "total_tokens, max_hot_tokens, min_hot_tokens and seen_hot_tokens must not be negative"
        )
    most = min(total_tokens, max_hot_tokens)
    least = min(min_hot_tokens, most)
    alphas = _Pair(hot=alpha, cold=alpha)
    if share is not None:
        seen = most if seen_hot_tokens is None else min(seen_hot_tokens, total_tokens)
        alphas = _skewed(alpha, total_tokens, share, seen)
    scores, sending = _token_s(rates, alphas, crosses_host_link)
    betas = [_ratio(scores.hot + sending.hot, scores.cold + sending.cold)]
    if selects_jointly:  # linear between these
        betas = [_ratio(scores.hot, scores.cold), _ratio(sending.hot, sending.cold)]
    spots = {least, most}
    for beta in betas:
        hot = total_tokens if math.isinf(beta) else total_tokens * beta / (1 + beta)
        whole = math.floor(min(max(hot, least), most))
        spots |= {whole, min(whole + 1, most)}
    found = [_split(total_tokens, hot, scores, sending, selects_jointly) for hot in spots]
    return min(found, key=lambda split: (split.step_s, -split.hot_tokens))


def _skewed(alpha: float, total: int, share: float, seen_hot: int) -> _Pair:
    """Of pools that were observed; alpha for one that held nothing."""
    count, seen_cold = alpha * total, total - seen_hot
    return _Pair(
        hot=min(1.0, share * count / seen_hot) if seen_hot else alpha,
        cold=min(1.0, (1 - share) * count / seen_cold) if seen_cold else alpha,
    )


def _token_s(rates: Rates, alphas: _Pair, crosses: bool) -> tuple[_Pair, _Pair]:
    """Seconds that a token of either pool takes to score, and its part of sending."""
    sent = _seconds(alphas.cold, rates.device_link)
    if crosses:
        sent += _seconds(alphas.cold, rates.host_link)
    scores = _Pair(hot=_seconds(1, rates.host_scores), cold=_seconds(1, rates.device_scores))
    return scores, _Pair(hot=_seconds(alphas.hot, rates.host_link), cold=sent)


def _split(total: int, hot: int, scores: _Pair, sending: _Pair, jointly: bool) -> Split:
    cold = total - hot
    scored = (_times(hot, scores.hot), _times(cold, scores.cold))
    sent = (_times(hot, sending.hot), _times(cold, sending.cold))
    host, device = (a + b for a, b in zip(scored, sent, strict=True))
    step = max(scored) + max(sent) if jointly else max(host, device)
    return Split(hot_tokens=hot, cold_tokens=cold, host_s=host, device_s=device, step_s=step)


def _times(tokens: int, token_s: float) -> float:
    return tokens * token_s if tokens else 0.0


def _ratio(hot_s: float, cold_s: float) -> float:
    """Hot tokens per cold one for equal times."""
    if hot_s == cold_s:
        return 1.0
    return cold_s / hot_s if hot_s else math.inf


def _seconds(tokens: float, rate: float) -> float:
    if not tokens:
        return 0.0
    return tokens / rate if rate else math.inf


class RateWatch:
    """Moving averages of measured rates, and whether they have left those last solved with.

    Averaged are seconds per token, whose mean is what the next step will take; the mean of rates
    would follow its fastest moments.
    """

    def __init__(self, start: Rates, *, smoothing: float = 0.1, drift: float = DRIFT) -> None:
        """Begin with rates that were profiled.

        Args:
            smoothing: weight of the newest measurement, above 0 to 1.
            drift: how far a rate may move, of what it was, before `drifted` says so.

        Raises:
            ConfigError: a number is out of its range.
        """
        if not 0 < smoothing <= 1 or not drift > 0:
            raise ConfigError(f"smoothing must be in (0, 1], drift above 0: {smoothing}, {drift}")
        self._smoothing, self._drift = smoothing, drift
        self._solved = self._now = start

    @property
    def rates(self) -> Rates:
        """As they are now."""
        return self._now

    def note(self, name: str, tokens: int, seconds: float) -> None:
        """A measurement of the rate of that name; one of no tokens or no time says nothing.

        The first one replaces a rate of 0 or infinity, which are not measured.
        """
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        before, seen = getattr(self._now, name), tokens / seconds
        if 0 < before < math.inf:
            weight = self._smoothing
            seen = 1 / ((1 - weight) / before + weight / seen)
        self._now = replace(self._now, **{name: seen})

    def drifted(self) -> bool:
        """Whether a rate has moved too far since `solved`, in either direction."""
        for field in fields(Rates):
            then, now = getattr(self._solved, field.name), getattr(self._now, field.name)
            if then != now and (math.isinf(then) or abs(now - then) > self._drift * then):
                return True
        return False

    def solved(self) -> None:
        """The rates as they are now were solved with."""
        self._solved = self._now
