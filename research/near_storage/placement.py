"""What moves between hot and cold pools per decode step, by placement, over a recorded decode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.clusters.key_stream import KeyStream
from research.near_storage.pools import RULES, Clairvoyant, Moved, PoolRule, Pools
from research.near_storage.trace import best, best_count, importance_steps, spread

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
