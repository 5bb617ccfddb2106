"""HillInfer's pools on a recorded decode: importance, rules, what they move, the premises."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.tiers.slot_table import ABSENT, SlotTable
from penstock.methods.hillinfer.hot_cold import DECAY_STEPS, HotCold, Placement
from research.clusters.recording import KeyStream

# How much attention each token of the past gets, step by step -------------------------------------

STEPS_AT_ONCE = 4


class Step(NamedTuple):
    """One decode step of one layer."""

    number: int
    """Steps before it."""
    length: int
    """Tokens of the past, the new token not among them."""
    importance: NDArray[np.float32]
    """Attention that each gets, all query heads added. [length]"""


def logits(stream: KeyStream, layer: int, first: int, count: int) -> Tensor:
    """Scaled products of some steps' queries with all keys that any of them may see.

    Args:
        first: position of the first step's token.
        count: steps.

    Returns:
        Minus infinity where a key comes after the query. [steps, heads, first + count]
    """
    keys = stream.keys[layer][:, : first + count]
    queries = stream.grouped_queries(layer)[:, :, first : first + count]
    heads, each, _, dim = queries.shape
    found = queries.reshape(heads, each * count, dim) @ keys.transpose(1, 2)
    found = found.view(heads * each, count, -1).transpose(0, 1) * stream.scaling[layer]
    after = torch.ones(count, first + count, dtype=torch.bool).triu(first + 1)
    return found.masked_fill_(after[:, None], -torch.inf)


def importance_steps(stream: KeyStream, layer: int) -> Iterator[Step]:
    """Every step behind the prompt: exact column sums of attention, in float32.

    Args:
        layer: its place in `stream.keys`.
    """
    begin, end = stream.prompt_tokens, int(stream.keys[layer].shape[1])
    for first in range(begin, end, STEPS_AT_ONCE):
        count = min(STEPS_AT_ONCE, end - first)
        sums = logits(stream, layer, first, count).softmax(dim=-1).sum(dim=1).numpy()
        for place in range(count):
            length = first + place
            yield Step(length - begin, length, sums[place, :length])


def best(importance: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` most important tokens, in no order; of none all are. [count]"""
    if count >= len(importance):
        return np.arange(len(importance))
    found: NDArray[np.int64] = importance.argpartition(len(importance) - count)[-count:]
    return found


def best_count(share: float, length: int) -> int:
    """Tokens that make a share of the past: at least one."""
    return max(1, min(length, int(np.ceil(share * length - 1e-9))))


def spread(values: NDArray[Any]) -> dict[str, float]:
    """Mean, median and 95th percentile, for a result."""
    if not len(values):
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    return {
        "mean": round(float(values.mean()), 3),
        "p50": round(float(np.percentile(values, 50)), 3),
        "p95": round(float(np.percentile(values, 95)), 3),
    }


# What moves between them, by placement ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PoolRule:
    """Who is brought into the hot pool, and who leaves it."""

    placement: Placement
    follows_score: bool
    """The whole hot pool is the best tokens of the step; else only what is selected comes in."""
    decay_steps: int = DECAY_STEPS

    @property
    def pins(self) -> bool:
        """New tokens stay."""
        return self.placement in ("pin", "both")


RULES = {
    "naive": PoolRule(placement="naive", follows_score=True),
    "pin": PoolRule(placement="pin", follows_score=True),
    "selected": PoolRule(placement="naive", follows_score=False),
    "table": PoolRule(placement="table", follows_score=False),
    "both": PoolRule(placement="both", follows_score=False),
}
"""The paper's steps from naive placement to both ideas; "selected" takes the table apart: only what
is selected comes in, and the lowest score goes."""


class Moved(NamedTuple):
    """What one step moved between the pools, in tokens."""

    promoted: int
    passed_through: int
    """Selected tokens that were read and did not stay in the hot pool."""
    demoted: int
    demoted_first: int
    """Demoted tokens that have never been in the cold pool."""
    hot_selected: int
    """Selected tokens that were in the hot pool before the step."""
    selected: int


class Pools:
    """One layer's pools over a decode; starts with the newest tokens of the prompt in the hot one.

    The token of a step is born in the hot pool: that is no promotion.
    """

    def __init__(
        self, rule: PoolRule, *, hot_share: float, alpha: float, prompt: int, total: int
    ) -> None:  # fmt: skip
        """Fill the hot pool.

        Args:
            hot_share: tokens of the hot pool, in those of the past.
            alpha: share of the past that a step selects, and that is pinned.
            prompt: tokens of the prompt.
            total: tokens at the end.
        """
        self.rule, self._hot_share, self._alpha = rule, hot_share, alpha
        slots = best_count(hot_share, total) + 1
        self.table = SlotTable(1, slots, total)
        self.policy = HotCold(
            1, total, placement=rule.placement, decay_steps=rule.decay_steps
        )  # fmt: skip
        self._was_cold = np.ones(total, dtype=np.bool_)
        held = best_count(hot_share, prompt)
        units = np.arange(prompt - held, prompt)
        self.table.admit(np.zeros(held, dtype=np.int64), units, np.arange(held))
        self._was_cold[prompt - held :] = False
        self._length = prompt

    @property
    def hot(self) -> NDArray[np.bool_]:
        """Which tokens are in the hot pool. [tokens]"""
        found: NDArray[np.bool_] = self.table.slot_of[0] >= 0
        return found

    def step(self, importance: NDArray[np.float32], selected: NDArray[np.int64]) -> Moved:
        """One decode step.

        Args:
            importance: of every token of the past. [length]
            selected: the most important `alpha` of them. [selected]
        """
        length = len(importance)
        born = np.arange(self._length, length)
        self._length = length
        hot_selected = int(self.hot[selected].sum() + np.isin(selected, born).sum())
        capacity = best_count(self._hot_share, length)
        pinned = best_count(self._alpha, length)
        wanted = self._wanted(importance, selected, born, capacity, pinned)
        found = self.table.look_up(wanted[None])
        self.policy.observe(self.table.unit_in, importance[None], length, pinned, capacity)
        _, shed = self.policy.surplus(found.pinned, found.counts)
        out = self.table.unit_in[0, shed]
        self.table.slot_of[0, out] = self.table.unit_in[0, shed] = ABSENT
        slots = self.policy.victims(found.pinned, found.counts)
        out = np.concatenate((out, self.table.unit_in[0, slots]))
        out = out[out >= 0]
        coming = wanted[found.columns]
        passed_through = int((~self.hot[np.setdiff1d(selected, wanted)]).sum())
        turned_away = np.setdiff1d(born, wanted)
        first = int((~self._was_cold[out]).sum()) + len(turned_away)
        self._was_cold[out] = True
        self._was_cold[turned_away] = True
        self.table.admit(found.rows, coming, slots)
        self.policy.note_selected(selected[None])
        return Moved(
            int((~np.isin(coming, born)).sum()), passed_through,
            len(out) + len(turned_away), first, hot_selected, len(selected),
        )  # fmt: skip

    def _wanted(
        self, importance: NDArray[np.float32], selected: NDArray[np.int64],
        born: NDArray[np.int64], capacity: int, pinned: int,
    ) -> NDArray[np.int64]:  # fmt: skip
        """Tokens that must be in the hot pool after the step, none twice."""
        length = len(importance)
        if not self.rule.follows_score:
            inside = selected[selected < length - len(born)]
            return np.concatenate((inside, born))
        if not self.rule.pins:
            return best(importance, capacity)
        pinned = min(pinned, capacity)
        new = np.arange(length - pinned, length)
        if capacity == pinned:
            return new
        return np.concatenate((best(importance[: length - pinned], capacity - pinned), new))


class Clairvoyant:
    """The fewest promotions that any choice of victims could have had: who is selected again last
    goes first (Belady).

    Selected tokens come in as with `RULES["both"]`, and those of the future are known.
    """

    def __init__(
        self, chosen: list[NDArray[np.int64]], *, hot_share: float, prompt: int, total: int
    ) -> None:  # fmt: skip
        """Look ahead.

        Args:
            chosen: what every step selects. [selected] each
        """
        self._hot_share, self._chosen = hot_share, chosen
        self._next = np.full((len(chosen) + 1, total), len(chosen) + 1, dtype=np.int32)
        for number in range(len(chosen) - 1, -1, -1):
            self._next[number] = self._next[number + 1]
            self._next[number, chosen[number]] = number
        held = best_count(hot_share, prompt)
        self.hot = np.zeros(total, dtype=np.bool_)
        self.hot[prompt - held : prompt] = True
        self._length = prompt

    def step(self, number: int, length: int) -> int:
        """One decode step; returns the tokens that were promoted."""
        selected = self._chosen[number]
        needed = np.union1d(selected, np.arange(self._length, length))
        self.hot[self._length : length] = True
        self._length = length
        missing = int((~self.hot[selected]).sum())
        self.hot[selected] = True
        over = int(self.hot.sum()) - max(best_count(self._hot_share, length), len(needed))
        if over > 0:
            held = self.hot.nonzero()[0]
            ahead = self._next[number + 1, held]
            ahead[np.isin(held, needed)] = -1
            self.hot[held[ahead.argpartition(len(held) - over)[-over:]]] = False
        return missing


# What moves between hot and cold pools per decode step, by placement, over a recorded dec----------

WARM_STEPS = 16
"""Steps after which the pools are taken to be settled."""
CLAIRVOYANT = "clairvoyant"
Counter = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One pair of pools."""

    hot_share: float
    alpha: float
    name: str
    rule: PoolRule


@dataclass(kw_only=True)
class _Counts:
    """What was counted, layer by layer and step by step."""

    moved: list[list[Moved]] = field(default_factory=list)
    fewest: list[list[int]] = field(default_factory=list)


def settings_of(
    hot_shares: Sequence[float], alphas: Sequence[float], names: Sequence[str] = tuple(RULES)
) -> list[Setting]:  # fmt: skip
    """All that fit: a hot pool holds at least what a step selects."""
    return [
        Setting(hot_share=share, alpha=alpha, name=name, rule=RULES[name])
        for share in hot_shares for alpha in alphas if share >= alpha for name in names
    ]  # fmt: skip


def decay_settings(hot_share: float, alpha: float, steps: Sequence[int]) -> list[Setting]:
    """Both ideas, with hits that fade so fast."""
    return [
        Setting(hot_share=hot_share, alpha=alpha, name=f"decay {every}",
                rule=replace(RULES["both"], decay_steps=every)) for every in steps
    ]  # fmt: skip


def measure_placement(
    stream: KeyStream, settings: Sequence[Setting], *, token_bytes: int, on_layer: Counter
) -> list[dict[str, Any]]:  # fmt: skip
    """Play every setting over every layer.

    Args:
        token_bytes: K and V of a token in one layer.
        on_layer: told the layers done so far.

    Returns:
        A row a setting; `clairvoyant` holds the fewest promotions where "both" was played.
    """
    counts = [_Counts() for _ in settings]
    for layer in range(len(stream.keys)):
        _play_layer(stream, layer, settings, counts)
        on_layer(layer + 1)
    return [
        _row(setting, found, token_bytes)
        for setting, found in zip(settings, counts, strict=True)
    ]  # fmt: skip


def _play_layer(
    stream: KeyStream, layer: int, settings: Sequence[Setting], counts: Sequence[_Counts]
) -> None:  # fmt: skip
    """One layer's whole decode under all settings at once."""
    prompt, total = stream.prompt_tokens, int(stream.keys[layer].shape[1])
    pools = [
        Pools(one.rule, hot_share=one.hot_share, alpha=one.alpha, prompt=prompt, total=total)
        for one in settings
    ]  # fmt: skip
    chosen: dict[float, list[NDArray[np.int64]]] = {one.alpha: [] for one in settings}
    moved: list[list[Moved]] = [[] for _ in settings]
    for step in importance_steps(stream, layer):
        for alpha, found in chosen.items():
            found.append(best(step.importance, best_count(alpha, step.length)))
        for place, one in enumerate(settings):
            moved[place].append(pools[place].step(step.importance, chosen[one.alpha][-1]))
    for place, one in enumerate(settings):
        counts[place].moved.append(moved[place])
        if one.name == "both":
            ahead = Clairvoyant(
                chosen[one.alpha], hot_share=one.hot_share, prompt=prompt, total=total
            )
            steps = range(total - prompt)
            counts[place].fewest.append([ahead.step(n, prompt + n) for n in steps])


def _row(setting: Setting, counts: _Counts, token_bytes: int) -> dict[str, Any]:
    """A setting's figures; tokens and bytes are of one layer and step."""
    moved = np.array(counts.moved, dtype=np.int64)
    promoted, passed, demoted, first, hot, selected = np.moveaxis(moved, -1, 0)
    warm = min(WARM_STEPS, promoted.shape[1] - 1)
    read = promoted + passed
    both_ways = read + demoted
    row = {
        "hot_share": setting.hot_share, "alpha": setting.alpha, "rule": setting.name,
        "decay_steps": setting.rule.decay_steps,
        "promoted": spread(promoted), "demoted": spread(demoted),
        "promoted_later": spread(promoted[:, warm:]), "demoted_later": spread(demoted[:, warm:]),
        "passed_through": round(float(passed.mean()), 3),
        "read_later": round(float(read[:, warm:].mean()), 3),
        "demoted_first": round(float(first.mean()), 3),
        "moved_bytes": round(float(both_ways.mean()) * token_bytes),
        "moved_bytes_later": round(float(both_ways[:, warm:].mean()) * token_bytes),
        "sent_bytes": round((float(read.mean()) + 1) * token_bytes),
        "sent_bytes_later": round((float(read[:, warm:].mean()) + 1) * token_bytes),
        "hot_share_of_selected": round(float((hot / selected).mean()), 4),
        "hot_share_of_selected_later": round(float((hot / selected)[:, warm:].mean()), 4),
        "selected": round(float(selected.mean()), 1),
        "promoted_of_layer": [round(float(x), 2) for x in promoted.mean(axis=1)],
        "demoted_of_layer": [round(float(x), 2) for x in demoted.mean(axis=1)],
        "hot_share_of_selected_of_layer": [
            round(float(x), 4) for x in (hot / selected).mean(axis=1)
        ],
        "promoted_of_step": [round(float(x)) for x in promoted.mean(axis=0)],
    }  # fmt: skip
    if counts.fewest:
        fewest = np.array(counts.fewest)
        row[CLAIRVOYANT] = spread(fewest)
        row[f"{CLAIRVOYANT}_later"] = spread(fewest[:, warm:])
    return row


# Who is important, and for how long ---------------------------------------------------------------

TOP, BOTTOM = 0.2, 0.2
"""Shares of the tokens that are important, and unimportant (figures 4 and 8)."""
IMPORTANT, SECONDARY, UNIMPORTANT = 0, 1, 2
OFTEN = 0.9
_BINS = 10
_MOST_COUNTS = 1024


def tiers_of(importance: NDArray[np.float32]) -> NDArray[np.int8]:
    """Each token's tier at a step: the best fifth, the middle, the last fifth. [length]"""
    length = len(importance)
    order = importance.argsort()[::-1]
    out = np.full(length, SECONDARY, dtype=np.int8)
    out[order[: int(TOP * length)]] = IMPORTANT
    out[order[length - int(BOTTOM * length) :]] = UNIMPORTANT
    return out


def measure_premises(stream: KeyStream) -> dict[str, Any]:
    """How much of the cache changes its tier from step to step, and who is important how often.

    Returns:
        `moved_storage`: share of the cache that comes out of the last tier or goes into it, by
        step; `moved_any`: share that changes its tier at all; their values by layer;
        `chance_storage`, `chance_any`: what they were if ranks had nothing to do with those of the
        step before; `counts`: by token, the steps in each tier, all layers added (if there are at
        most 1,024 tokens); `important_shares`: tokens by the share of their steps in the best
        tier, in tenths, prompt and output apart.
    """
    by_layer = [_layer(stream, layer) for layer in range(len(stream.keys))]
    counts = np.sum([counts for counts, *_ in by_layer], axis=0)
    storage = np.array([row for _, row, _ in by_layer])
    other = np.array([row for *_, row in by_layer])
    prompt = stream.prompt_tokens
    middle = 1 - TOP - BOTTOM
    found = {
        "prompt_tokens": prompt, "output_tokens": stream.output_tokens,
        "moved_storage": [round(float(x), 4) for x in storage.mean(axis=0)],
        "moved_any": [round(float(x), 4) for x in other.mean(axis=0)],
        "moved_storage_of_layer": [round(float(x), 4) for x in storage.mean(axis=1)],
        "moved_any_of_layer": [round(float(x), 4) for x in other.mean(axis=1)],
        "chance_storage": round(2 * BOTTOM * (1 - BOTTOM), 4),
        "chance_any": round(1 - TOP**2 - BOTTOM**2 - middle**2, 4),
        "important_shares": {
            "prompt": _tenths([counts[:prompt] for counts, *_ in by_layer]),
            "output": _tenths([counts[prompt:] for counts, *_ in by_layer]),
        },
        "often_important": _often([counts[:prompt] for counts, *_ in by_layer]),
        "new_important": _new([counts[prompt:] for counts, *_ in by_layer]),
    }  # fmt: skip
    if len(counts) <= _MOST_COUNTS:
        found["counts"] = counts.tolist()
    return found


def _layer(
    stream: KeyStream, layer: int
) -> tuple[NDArray[np.int64], list[float], list[float]]:  # fmt: skip
    """Steps of each token in each tier, and the two shares that moved, by step."""
    counts = np.zeros((stream.keys[layer].shape[1], 3), dtype=np.int64)
    storage, other = list[float](), list[float]()
    before: NDArray[np.int8] | None = None
    for step in importance_steps(stream, layer):
        now = tiers_of(step.importance)
        counts[np.arange(step.length), now] += 1
        if before is not None:
            old, new = before, now[: len(before)]
            crossed = (old == UNIMPORTANT) != (new == UNIMPORTANT)
            storage.append(float(crossed.mean()))
            other.append(float((old != new).mean()))
        before = now
    return counts, storage, other


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of its steps that each token was important in; of those that had any."""
    seen = counts.sum(axis=1)
    shares: NDArray[np.float64] = counts[seen > 0, IMPORTANT] / seen[seen > 0]
    return shares


def _tenths(layers: list[NDArray[np.int64]]) -> list[float]:
    """Share of the tokens in each tenth, all layers together."""
    shares = np.concatenate([_shares(counts) for counts in layers])
    found, _ = np.histogram(shares, bins=_BINS, range=(0.0, 1.0))
    return [round(float(count) / max(1, len(shares)), 4) for count in found]


def _often(layers: list[NDArray[np.int64]]) -> float:
    """Of the places among the important, those of tokens that have one in nine steps of ten."""
    often = all_places = 0
    for counts in layers:
        seen = counts.sum(axis=1)
        places = counts[:, IMPORTANT]
        often += int(places[places >= OFTEN * np.maximum(1, seen)].sum())
        all_places += int(places.sum())
    return round(often / max(1, all_places), 4)


def _new(layers: list[NDArray[np.int64]]) -> float:
    """Share of their steps that tokens of the output are important in."""
    counts = np.sum([found.sum(axis=0) for found in layers], axis=0)
    return round(float(counts[IMPORTANT] / max(1, counts.sum())), 4)
