"""HillInfer's figures 4 and 8 on a recorded decode: who is important, and for how long."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.clusters.key_stream import KeyStream
from research.near_storage.trace import importance_steps

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
