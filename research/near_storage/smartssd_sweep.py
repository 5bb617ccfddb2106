"""The simulated PC asked: latencies by length, ablations, splits, what decides, and what is known.

Every figure here is of a model (smartssd_step, smartssd_hillinfer); nothing is measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from penstock.methods.hillinfer.work_split import balance
from research.near_storage.smartssd_constants import GIB, SHAPES, Constants
from research.near_storage.smartssd_hillinfer import (
    ABLATIONS,
    FP16,
    INT8,
    JOINT,
    VARIANTS,
    Variant,
    choose_split,
    hillinfer_step,
    rates,
)
from research.near_storage.smartssd_places import NO_LOCALITY, Locality, Workload, divide
from research.near_storage.smartssd_step import BASELINES, FULL, StepTime, baseline_step

RIVALS = tuple(name for name in BASELINES if name != FULL)
"""What the paper's speed-ups are over."""
PAPER_SPEEDUP = (4.21, 8.56)
"""HillInfer section 5.3: least and most."""
HOST_KV_GIB = (8, 16, 32, 56)
LOCALITY = "share of selection that is hot"
_BETAS = 241
_LONGEST_FACTOR = 256.0

Row = dict[str, Any]


def step_row(step: StepTime, work: Workload) -> Row:
    """A step as plain data."""
    places = step.places
    return {
        "model": work.shape.name, "tokens": work.tokens, "batch": work.batch,
        "alpha": work.alpha, "method": step.method, "step_ms": 1e3 * step.step_s,
        "gpu_ms": 1e3 * step.gpu_s, "scoring_ms": 1e3 * step.scoring_s,
        "fetch_ms": 1e3 * step.fetch_s, "kv_bytes": work.kv_bytes,
        "storage_read_bytes": work.shape.layers * step.layer.storage_read_bytes,
        "gpu_share": places.gpu / places.total, "host_share": places.host / places.total,
        "storage_share": places.storage / places.total,
        "beta": None if step.beta is None or math.isinf(step.beta) else step.beta,
    }  # fmt: skip


def lengths(
    pc: Constants, works: Iterable[Workload], locality: Locality,
    variants: Sequence[Variant] = (*VARIANTS, JOINT, *ABLATIONS),
) -> list[Row]:  # fmt: skip
    """All methods at each workload.

    Baselines also with HillInfer's placement (`placed_ms`), with a drive no faster than the
    SmartSSD's link (`same_drive_ms`), and with their indexes on that drive too (`kindest_ms`).
    """
    rows = []
    same = replace(pc, ssd_bandwidth=pc.device_read)
    for work in works:
        for name in BASELINES:
            row = step_row(baseline_step(name, pc, work), work)
            row["placed_ms"] = 1e3 * baseline_step(name, pc, work, locality).step_s
            row["same_drive_ms"] = 1e3 * baseline_step(name, same, work).step_s
            kindest = baseline_step(name, same, work, index_in_memory=False)
            row["kindest_ms"] = 1e3 * kindest.step_s
            rows.append(row)
        rows += [step_row(hillinfer_step(pc, work, locality, one), work) for one in variants]
    return rows


def speedup(
    pc: Constants, work: Workload, locality: Locality, variant: Variant, rival: str
) -> float:
    """Of a variant over a baseline: step time over step time."""
    ours = hillinfer_step(pc, work, locality, variant).step_s
    return baseline_step(rival, pc, work).step_s / ours


def by_locality(
    pc: Constants, works: Iterable[Workload], localities: Sequence[Locality]
) -> list[Row]:
    """Speed-ups where storage is used, for each recording."""
    return [
        {"source": locality.source, "tokens": work.tokens, "method": variant.name,
         "speedups": {name: speedup(pc, work, locality, variant, name) for name in RIVALS}}
        for work in works if divide(pc, work).storage
        for locality in localities for variant in VARIANTS
    ]  # fmt: skip


def host_memory(
    pc: Constants, work: Workload, locality: Locality, variant: Variant
) -> list[Row]:  # fmt: skip
    """Speed-ups with less host memory for KV: what the paper's systems took is not said."""
    rows = []
    for gib in HOST_KV_GIB:
        other = replace(pc, host_bytes=pc.host_reserve_bytes + gib * GIB)
        rows.append({
            "tokens": work.tokens, "host_kv_gib": gib,
            "storage_share": divide(other, work).storage / work.layer_tokens,
            "speedups": {name: speedup(other, work, locality, variant, name) for name in RIVALS},
        })  # fmt: skip
    return rows


def split_sweep(
    pc: Constants, work: Workload, locality: Locality, variant: Variant, title: str
) -> dict[str, Any]:
    """Evaluation and fetch of a layer by beta, the best of them, and Eq. 4's."""
    places = divide(pc, work)
    total, most = places.below_gpu, places.host

    def milliseconds(hot: int) -> float:
        found = hillinfer_step(pc, work, locality, variant, hot_tokens=hot)
        return 1e3 * found.layer.seconds

    split = choose_split(pc, work, locality, variant)
    share = work.alpha
    found = rates(pc, work, split.cold_tokens, variant)
    betas = np.geomspace(0.05, 400, _BETAS)
    hots = sorted({min(most, round(total * beta / (1 + beta))) for beta in betas})
    points = [(hot, milliseconds(hot)) for hot in hots]
    best = _least(milliseconds, points)
    return {
        "title": title, "tokens": work.tokens, "max_beta": _beta(most, total),
        "eq4_beta": _beta(split.hot_tokens, total), "eq4_ms": milliseconds(split.hot_tokens),
        "unbounded_beta": balance(found, share),
        "figure_16b_beta": balance(found, share, crosses_host_link=True),
        "best_beta": _beta(best, total), "best_ms": milliseconds(best),
        "points": [{"beta": _beta(hot, total), "ms": ms} for hot, ms in points],
    }  # fmt: skip


def _least(milliseconds: Any, points: Sequence[tuple[int, float]]) -> int:
    """The best count of hot tokens, looked for between the neighbours of the best point."""
    place = min(range(len(points)), key=lambda at: points[at][1])
    low = points[max(0, place - 1)][0]
    high = points[min(len(points) - 1, place + 1)][0]
    tried = np.unique(np.linspace(low, high, 400).round().astype(int)).tolist()
    return int(min([*tried, points[place][0]], key=milliseconds))


def _beta(hot: int, total: int) -> float | None:
    return None if hot == total else hot / (total - hot)


def splits(pc: Constants, work: Workload, long: Workload, locality: Locality) -> list[Row]:
    """Eq. 4 under its own assumptions, with one selection over both pools, and where M_0 binds."""
    plain = replace(INT8, holds_codes=False, name="plain")
    apart = replace(plain, waits_for_all=False)
    return [
        split_sweep(pc, work, NO_LOCALITY, apart, "as Eq. 2: each side sends when it has scored"),
        split_sweep(pc, work, NO_LOCALITY, plain, "one top alpha of both pools"),
        split_sweep(pc, work, locality, apart, "as Eq. 2, selection skewed as recorded"),
        split_sweep(pc, long, NO_LOCALITY, apart, "as Eq. 2, host memory binds"),
    ]


def sensitivity(
    pc: Constants, work: Workload, locality: Locality, variant: Variant
) -> list[Row]:  # fmt: skip
    """Speed-ups with every constant 20 % lower and higher, alpha and the locality too; most telling
    first."""
    rows = []
    for name in [*(each.name for each in fields(Constants)), "alpha", LOCALITY]:
        row: Row = {"name": name}
        for factor in (0.8, 1.2):
            there, other, pools = pc, work, locality
            if name == "alpha":
                other = replace(work, alpha=factor * work.alpha)
            elif name == LOCALITY:
                shares = [min(1.0, factor * share) for share in locality.selected]
                pools = replace(locality, selected=shares)
            else:
                there = pc.scaled(factor, name)
            row[f"{factor}"] = {
                rival: speedup(there, other, pools, variant, rival) for rival in RIVALS
            }
        rows.append(row)
    return sorted(rows, key=lambda row: -max(abs(row["1.2"][r] - row["0.8"][r]) for r in RIVALS))


NEEDED = (
    ("ssd_bandwidth", ("ssd_bandwidth",), -1), ("device_internal", ("device_internal",), 1),
    ("device_internal and device_link", ("device_internal", "device_link"), 1),
)  # fmt: skip
"""Constants that could bring a speed-up about, and in which direction."""


def needed(
    pc: Constants, work: Workload, locality: Locality, variant: Variant, target: float
) -> list[Row]:
    """What a constant would have to be for a speed-up of `target`; None: no value does it."""
    rows = []
    for title, names, direction in NEEDED:
        row: Row = {"constant": title, "now": getattr(pc, names[0]), "needed": {}}
        for rival in RIVALS:
            low, high = 0.0, math.log(_LONGEST_FACTOR)

            def gain(power: float, names: Any = names, sign: int = direction,
                     rival: str = rival) -> float:  # fmt: skip
                there = pc.scaled(math.exp(sign * power), *names)
                return speedup(there, work, locality, variant, rival)

            if gain(low) >= target:
                row["needed"][rival] = row["now"]
                continue
            if gain(high) < target:
                row["needed"][rival] = None
                continue
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (low, middle) if gain(middle) >= target else (middle, high)
            row["needed"][rival] = row["now"] * math.exp(direction * high)
        rows.append(row)
    return rows


def calibration(pc: Constants) -> dict[str, Any]:
    """Figure 3a: 20 and 30 % of the KV of Qwen-7B, batch 8, 12K tokens, from the SSD."""
    work = Workload(shape=SHAPES["qwen-7b"], tokens=12 * 1024)
    shares = (0.2, 0.3)
    return {
        "figure": "3a", "tokens": work.tokens, "batch": work.batch, "paper_ms": 2000.0,
        "shares": list(shares),
        "ours_ms": [1e3 * share * work.kv_bytes / pc.ssd_bandwidth for share in shares],
        "bandwidth_for_2000_ms": [share * work.kv_bytes / 2.0 for share in shares],
    }  # fmt: skip


def batches(pc: Constants, locality: Locality, variant: Variant) -> dict[str, Any]:
    """Figure 14: OPT-6.7B, 1,920 tokens in and 128 out, by batch; seconds of the 128 steps."""
    output = 128
    rows: list[Row] = []
    for batch in (1, 2, 4, 6, 8, 10):
        work = Workload(shape=SHAPES["opt-6.7b"], tokens=1920 + output // 2, batch=batch)
        seconds = {name: output * baseline_step(name, pc, work).step_s for name in BASELINES}
        for one in (FP16, variant):
            seconds[one.name] = output * hillinfer_step(pc, work, locality, one).step_s
        stored = divide(pc, work).storage
        rows.append({"batch": batch, "seconds": seconds, "kv_bytes": work.kv_bytes,
                     "storage_share": stored / work.layer_tokens})  # fmt: skip
    return {
        "figure": "14", "rows": rows, "paper_over_s": 50.0, "paper_hillinfer_under_s": 25.0,
        "bandwidth_if_all_kv_moved": output * work.kv_bytes / 50.0,
    }  # fmt: skip
