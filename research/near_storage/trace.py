"""A decode's importance: how much attention each token of the past gets, step by step."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from research.clusters.key_stream import KeyStream

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
