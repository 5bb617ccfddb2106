"""How well cheap scores find the most important tokens: by rule, bits and normaliser."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels.key_codes import KeyCodes
from research.clusters.recording import KeyStream
from research.near_storage.placement import RULES, Pools, best, best_count, logits

FloatArray = NDArray[np.float32]
PRODUCTS, ENGINE = "products", "engine"
BITS = (16, 8, 4)
"""Of the keys that are scored; 16 for the keys as they are."""
SAMPLED = 16
SETTLED = 16
"""Steps after which the hot pool is taken to be settled."""
Counter = Callable[[int], None]


class Scored(NamedTuple):
    """One rule's scores of one step."""

    rule: str
    bits: int
    scores: FloatArray
    """Of the tokens of the past. [length]"""


class _Step(NamedTuple):
    """One step's logits, and who was hot."""

    length: int
    query: FloatArray
    """[heads, head_dim]"""
    exact: FloatArray
    """From the keys as they are, the new token's last. [heads, length + 1]"""
    hot: NDArray[np.bool_]
    """[length]"""


class _LogSums(NamedTuple):
    """Logs of summed exponentials, of each head. [heads]"""

    everything: FloatArray
    hot: FloatArray


def measure_agreement(
    stream: KeyStream, tops: Sequence[float], *, hot_share: float, dtype: str,
    on_layer: Counter,
) -> dict[str, Any]:  # fmt: skip
    """Compare the tokens that every rule chooses with those that get the most attention.

    Args:
        tops: shares of the past that are chosen.
        hot_share: size of the hot pool, which both ideas of the paper keep.
        dtype: of the model's keys: "bfloat16", "float16" or "float32".
        on_layer: told the layers done so far.

    Returns:
        `rows`, one for a rule, its bits and a top: `overlap` with the exact choice, `same` with the
        same rule's on the keys as they are, `mass` of attention on what was chosen, each as a mean
        and by layer; and `best_mass` by top, the most that can be had.
    """
    found: dict[tuple[str, int, float], list[tuple[float, float, float]]] = {}
    most: dict[float, list[float]] = {}
    for layer in range(len(stream.keys)):
        sums, best_mass, steps = _layer(stream, layer, tops, hot_share, dtype)
        for key, values in sums.items():
            overlap, same, mass = (float(value) / steps for value in values)
            found.setdefault(key, []).append((overlap, same, mass))
        for top, value in best_mass.items():
            most.setdefault(top, []).append(value / steps)
        on_layer(layer + 1)
    rows = []
    for (rule, bits, top), layers in found.items():
        row: dict[str, Any] = {"rule": rule, "bits": bits, "top": top}
        for place, name in enumerate(("overlap", "same", "mass")):
            row[name] = round(sum(one[place] for one in layers) / len(layers), 4)
            row[f"{name}_of_layer"] = [round(one[place], 4) for one in layers]
        rows.append(row)
    return {
        "rows": rows,
        "best_mass": [
            {"top": top, "mass": round(sum(values) / len(values), 4),
             "mass_of_layer": [round(value, 4) for value in values]}
            for top, values in most.items()
        ],
    }  # fmt: skip


def _layer(
    stream: KeyStream, layer: int, tops: Sequence[float], hot_share: float, dtype: str
) -> tuple[dict[tuple[str, int, float], NDArray[np.float64]], dict[float, float], int]:  # fmt: skip
    """Sums over the settled steps: overlap, same and mass by rule, the most mass by top."""
    coded = {bits: _coded(stream, layer, bits, dtype) for bits in BITS if bits < 16}
    sums: dict[tuple[str, int, float], NDArray[np.float64]] = {}
    most = dict.fromkeys(tops, 0.0)
    settled, steps = min(SETTLED, stream.output_tokens // 2), 0
    last: _LogSums | None = None
    for number, step in enumerate(_steps(stream, layer, max(tops), hot_share)):
        logs = _log_sums(step)
        importance = _shares(step.exact, logs.everything)[: step.length]
        if number >= max(1, settled) and last is not None:
            steps += 1
            scored = list(_scored(stream, layer, step, logs, last, coded))
            for top in tops:
                count = best_count(top, step.length)
                most[top] += _compare(sums, importance, scored, count, top)
        last = logs
    return sums, most, max(1, steps)


def _compare(
    sums: dict[tuple[str, int, float], NDArray[np.float64]], importance: FloatArray,
    scored: Sequence[Scored], count: int, top: float,
) -> float:  # fmt: skip
    """Add one step's figures to `sums`; returns the most mass that `count` tokens hold."""
    right = np.zeros(len(importance), dtype=np.bool_)
    right[best(importance, count)] = True
    total = float(importance.sum())
    plain: dict[str, NDArray[np.bool_]] = {ENGINE: right}
    for one in scored:
        chosen = best(one.scores, count)
        if one.bits == 16:
            plain[one.rule] = np.zeros(len(importance), dtype=np.bool_)
            plain[one.rule][chosen] = True
        values = (
            float(right[chosen].mean()), float(plain[one.rule][chosen].mean()),
            float(importance[chosen].sum()) / total,
        )  # fmt: skip
        key = (one.rule, one.bits, top)
        sums[key] = sums.get(key, np.zeros(3)) + values
    return float(importance[right].sum()) / total


def _scored(
    stream: KeyStream, layer: int, step: _Step, logs: _LogSums, last: _LogSums,
    coded: dict[int, KeyCodes],
) -> Iterator[Scored]:  # fmt: skip
    """Every rule's scores of one step, those in 16 bits first."""
    length, scaling = step.length, stream.scaling[layer]
    normalisers = _normalisers(step, logs, last)
    for bits in BITS:
        if bits == 16:
            found = step.exact[:, :length]
            yield Scored(PRODUCTS, bits, found.sum(axis=0) / np.float32(scaling))
        else:
            found, out = _coded_scores(coded[bits], step.query, scaling, length)
            yield Scored(PRODUCTS, bits, out)
            yield Scored(ENGINE, bits, _as_it_runs(step, logs, found))
        for name, normaliser in normalisers.items():
            yield Scored(name, bits, _shares(found, normaliser))


def _coded_scores(
    codes: KeyCodes, query: FloatArray, scaling: float, length: int
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """A query's logits from codes, and its raw products. [heads, length], [length]"""
    units = np.arange(length)
    found = np.empty((len(query), length), dtype=np.float32)
    codes.logits(codes.prepare(query, np.zeros(len(query), np.float32), scaling), units, found)
    out = np.empty(length, dtype=np.float32)
    codes.score_prepared(codes.prepare(query, None, scaling), units, out)
    return found, out


def _normalisers(step: _Step, logs: _LogSums, last: _LogSums) -> dict[str, FloatArray]:
    """The log-sums that may normalise each head's attention, by name. [heads] each

    now: of this step over everything; hot: over the hot pool; hot_ratio: over the hot pool, in the
    ratio of the step before; hot_sample: over the hot pool and one cold token in sixteen; last: of
    the step before over everything; last_hot: of the step before over the hot pool.
    """
    sample = step.exact[:, :-1][:, (~step.hot).nonzero()[0][::SAMPLED]]
    cold = int((~step.hot).sum())
    sampled = logs.hot
    if cold:
        more = _log_sum(sample) + np.float32(np.log(cold / sample.shape[1]))
        sampled = np.logaddexp(logs.hot, more)
    return {
        "now": logs.everything, "hot": logs.hot, "last": last.everything, "last_hot": last.hot,
        "hot_ratio": logs.hot + last.everything - last.hot, "hot_sample": sampled,
    }  # fmt: skip


def _as_it_runs(step: _Step, logs: _LogSums, found: FloatArray) -> FloatArray:
    """Hot tokens from their keys, cold ones from codes, normalised by both together. [length]"""
    mixed = np.where(step.hot, step.exact[:, :-1], found)
    cold = found[:, ~step.hot]
    normaliser = np.logaddexp(logs.hot, _log_sum(cold)) if cold.shape[1] else logs.hot
    return _shares(mixed, normaliser)


def _steps(stream: KeyStream, layer: int, alpha: float, hot_share: float) -> Iterator[_Step]:
    """The decode steps of a layer, over a hot pool that is kept on the way."""
    begin, end = stream.prompt_tokens, int(stream.keys[layer].shape[1])
    pools = Pools(
        RULES["both"], hot_share=max(hot_share, alpha), alpha=alpha, prompt=begin, total=end
    )  # fmt: skip
    for length in range(begin, end):
        exact = logits(stream, layer, length, 1)[0].numpy()
        hot = pools.hot[:length].copy()
        hot[max(begin, length - 1) :] = True
        yield _Step(length, stream.queries[layer][:, length].numpy(), exact, hot)
        importance = _shares(exact, _log_sum(exact))[:length]
        pools.step(importance, best(importance, best_count(alpha, length)))


def _log_sums(step: _Step) -> _LogSums:
    """Over everything, and over the hot pool with the new token."""
    held = np.append(step.hot, True)
    return _LogSums(_log_sum(step.exact), _log_sum(step.exact[:, held]))


def _log_sum(values: FloatArray) -> FloatArray:
    """Log of summed exponentials along the last axis."""
    found: FloatArray = torch.from_numpy(values).logsumexp(dim=-1).numpy()
    return found


def _shares(values: FloatArray, normalisers: FloatArray) -> FloatArray:
    """Shares of the softmax, heads added. [tokens]"""
    found: FloatArray = np.exp(values - normalisers[:, None]).sum(axis=0)
    return found


def _coded(stream: KeyStream, layer: int, bits: int, dtype: str) -> KeyCodes:
    """All keys of a layer; a unit is a token."""
    keys = stream.keys[layer].transpose(0, 1)
    tokens, heads, dim = keys.shape
    codes = KeyCodes(tokens, heads, dim, dtype, bits)
    raw = keys.to(getattr(torch, dtype)).reshape(tokens, -1).view(torch.uint8).numpy()
    codes.put(np.arange(tokens), raw)
    return codes
