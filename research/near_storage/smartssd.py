"""`python -m research.near_storage.smartssd`: HillInfer on a simulated SmartSSD PC.

A model, not a measurement: the paper's machine as published figures and assumptions, each with its
source in the result. How much of a selection is hot comes from recorded decodes where --locality
names a result of `research.near_storage placement`.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.figure_style import short_tokens
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.methods.hillinfer.work_split import balance
from research.near_storage.smartssd_machine import (
    ASSUMED_LOCALITY,
    GIB,
    NO_LOCALITY,
    SHAPES,
    Constants,
    Locality,
    Workload,
    divide,
    listed,
    read_locality,
)
from research.near_storage.smartssd_step import (
    ABLATIONS,
    BASELINES,
    FP16,
    FULL,
    INT8,
    JOINT,
    VARIANTS,
    StepTime,
    Variant,
    baseline_step,
    choose_split,
    hillinfer_step,
    rates,
)

# Latencies by length, ablations, splits, what decides, and what is known --------------------------
#
# Every figure here is of a model (smartssd_step, smartssd_hillinfer); nothing is measured.

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


# Our model's figures with the paper's beside them -------------------------------------------------


def row_of(rows: Sequence[Row], model: str, tokens: int, method: str) -> Row:
    """The row of one method at one length."""
    return next(
        row for row in rows
        if (row["model"], row["tokens"], row["method"]) == (model, tokens, method)
    )  # fmt: skip


def gains(rows: Sequence[Row], row: Row, field: str = "step_ms") -> dict[str, float]:
    """Speed-ups of a row over the three baselines at its length.

    Args:
        field: of the baselines: "step_ms", "placed_ms", "same_drive_ms" or "kindest_ms".
    """
    own = row["step_ms"]
    return {
        name: row_of(rows, row["model"], row["tokens"], name)[field] / own for name in RIVALS
    }  # fmt: skip


def smartssd_table(figures: Row) -> str:
    """All tables."""
    rows: list[Row] = figures["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = [_latencies([row for row in rows if row["model"] == model]) for model in models]
    parts += [_speedups(rows), _splits(figures["splits"]), _sensitivity(figures["sensitivity"])]
    parts += [_by_locality(figures["by_locality"])]
    parts += [_needed(figures["needed"]), _host_memory(figures["host_memory"]), _known(figures)]
    return "\n\n".join(parts)


def _latencies(rows: Sequence[Row]) -> str:
    spots = list(dict.fromkeys(row["tokens"] for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    first = rows[0]
    header = [f"{first['model']}, batch {first['batch']}: simulated ms of a step",
              *(short_tokens(tokens) for tokens in spots)]  # fmt: skip
    found = [
        [name, *(f"{row_of(rows, first['model'], tokens, name)['step_ms']:,.0f}"
                 for tokens in spots)]
        for name in names
    ]  # fmt: skip
    stored = [
        f"{row_of(rows, first['model'], tokens, names[0])['storage_share']:.0%}" for tokens in spots
    ]
    found.append(["KV that memory cannot hold", *stored])
    return format_table(header, found)


def _speedups(rows: Sequence[Row]) -> str:
    least, most = PAPER_SPEEDUP
    header = [f"speed-up, simulated (paper: {least} to {most}x)", "tokens", *RIVALS,
              "placed", "its drive", "kindest"]  # fmt: skip
    found = []
    for row in rows:
        if not row["method"].startswith("hillinfer"):
            continue
        over = gains(rows, row)
        others = [gains(rows, row, f"{field}_ms") for field in ("placed", "same_drive", "kindest")]
        found.append([
            f"{row['method']}, {row['model']}", short_tokens(row["tokens"]),
            *(f"{over[name]:.2f}" for name in RIVALS),
            *(f"{min(each.values()):.2f}..{max(each.values()):.2f}" for each in others),
        ])  # fmt: skip
    note = (
        "placed: baselines whose memory holds what HillInfer's does; its drive: their SSD no "
        "faster than the SmartSSD's link; kindest: and their indexes on it"
    )
    return f"{format_table(header, found)}\n{note}"


def _splits(sweeps: Sequence[Row]) -> str:
    header = ["split of the pools (Eq. 4, fig. 16b)", "tokens", "Eq. 4", "ms", "best", "ms ",
              "off by", "fig. 16b's"]  # fmt: skip
    rows = []
    for sweep in sweeps:
        eq4, best = sweep["eq4_beta"], sweep["best_beta"]
        off = "-" if None in (eq4, best) else f"{eq4 / best - 1:+.1%}"
        rows.append([
            sweep["title"], short_tokens(sweep["tokens"]), _beta_text(eq4),
            f"{sweep['eq4_ms']:.2f}", _beta_text(best), f"{sweep['best_ms']:.2f}", off,
            f"{sweep['figure_16b_beta']:.2f}",
        ])  # fmt: skip
    return format_table(header, rows)


def _beta_text(beta: float | None) -> str:
    return "all hot" if beta is None else f"{beta:.2f}"


def _sensitivity(found: Row) -> str:
    header = [f"{found['method']} at {short_tokens(found['tokens'])}: speed-up at -20 % / +20 %",
              *RIVALS]  # fmt: skip
    rows = [["as it is", *(f"{found['speedups'][name]:.2f}" for name in RIVALS)]]
    rows += [
        [row["name"], *(f"{row['0.8'][name]:.2f} / {row['1.2'][name]:.2f}" for name in RIVALS)]
        for row in found["rows"]
    ]
    return format_table(header, rows)


def _by_locality(rows: Sequence[Row]) -> str:
    header = ["speed-up by locality", "tokens", *RIVALS]
    return format_table(header, [
        [f"{row['method']}: {row['source']}", short_tokens(row["tokens"]),
         *(f"{row['speedups'][name]:.2f}" for name in RIVALS)] for row in rows
    ])  # fmt: skip


def _needed(found: Row) -> str:
    rows = [
        [f"{row['constant']}, {row['now'] / 1e9:.1f} GB/s now",
         *("none" if row["needed"][name] is None else f"{row['needed'][name] / 1e9:.2f}"
           for name in RIVALS)]
        for row in found["rows"]
    ]  # fmt: skip
    title = f"GB/s for {found['target']}x ({found['method']}, {short_tokens(found['tokens'])})"
    return format_table([title, *RIVALS], rows)


def _host_memory(rows: Sequence[Row]) -> str:
    header = ["host memory for KV: speed-up", "tokens", "KV in storage", *RIVALS]
    return format_table(header, [
        [f"{row['host_kv_gib']} GiB", short_tokens(row["tokens"]), f"{row['storage_share']:.0%}",
         *(f"{row['speedups'][name]:.2f}" for name in RIVALS)] for row in rows
    ])  # fmt: skip


def _known(figures: Row) -> str:
    """Absolute figures that the paper's text has, beside the model's."""
    move, batch = figures["calibration"], figures["batches"]
    ours = ", ".join(
        f"{share:.0%} {ms:,.0f} ms"
        for share, ms in zip(move["shares"], move["ours_ms"], strict=True)
    )
    slowest, fastest = (bandwidth / 1e9 for bandwidth in move["bandwidth_for_2000_ms"])
    last = batch["rows"][-1]
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in last["seconds"].items())
    return (
        f"Fig. 3a, KV from the SSD at 12K, batch 8: ours {ours}; paper: more than "
        f"{move['paper_ms']:,.0f} ms (2,000 ms are {slowest:.1f} to {fastest:.1f} GB/s)\n"
        f"Fig. 14, OPT-6.7B, 1,920 + 128 tokens, batch {last['batch']}: ours {seconds}; paper: "
        f"H2O-like and prefetch-based over {batch['paper_over_s']:.0f} s, HillInfer under "
        f"{batch['paper_hillinfer_under_s']:.0f} s. All KV of that fits GPU and host memory here "
        f"({last['storage_share']:.0%} in storage); moving all of it at every step in 50 s would "
        f"be {batch['bandwidth_if_all_kv_moved'] / 1e9:.0f} GB/s"
    )


# HillInfer on a simulated SmartSSD PC -------------------------------------------------------------

KIND = "near_storage.smartssd"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--models", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    add("--lengths", default="4,8,12,16,24,36", help="contexts in units of 1,024 tokens")
    add("--batch", type=int, default=8)
    add("--alpha", type=float, default=0.2, help="share of the tokens that is selected")
    add("--locality", metavar="FILES", help="results of the placement bench, the first for all that"
        " is shown, the others for speed-ups beside it; default: assumed")  # fmt: skip
    add("--variant", default=VARIANTS[1].name, choices=[one.name for one in VARIANTS],
        help="whose sensitivity is shown")  # fmt: skip
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    try:
        args.lengths = sorted({int(number) for number in args.lengths.split(",")})
    except ValueError as error:
        raise ConfigError(f"--lengths takes numbers like 4,12, not {args.lengths!r}") from error
    if min(args.lengths) < 1 or args.batch < 1 or not 0 < args.alpha < 1:
        raise ConfigError("--lengths and --batch must be at least 1, --alpha between 0 and 1")
    args.models = args.models.split(",")
    if unknown := set(args.models) - set(SHAPES):
        raise ConfigError(f"no model is called {min(unknown)!r}; there are {', '.join(SHAPES)}")
    return args


def measure(args: argparse.Namespace, localities: Sequence[Locality]) -> dict[str, Any]:
    """Everything that the model is asked."""
    pc, locality = Constants(), localities[0]

    def work(model: str, tokens: int) -> Workload:
        return Workload(
            shape=SHAPES[model], tokens=1024 * tokens, batch=args.batch, alpha=args.alpha
        )

    works = [work(model, tokens) for model in args.models for tokens in args.lengths]
    ours = next(one for one in VARIANTS if one.name == args.variant)
    middle = work(args.models[0], 12)
    longest = work(args.models[0], args.lengths[-1])
    target = PAPER_SPEEDUP[0]
    about = {"method": ours.name, "model": longest.shape.name, "tokens": longest.tokens}
    return {
        "simulated": True, "constants": listed(pc), "locality": asdict(locality),
        "paper_speedup": list(PAPER_SPEEDUP), "rows": lengths(pc, works, locality),
        "splits": splits(pc, middle, longest, locality),
        "sensitivity": {
            **about, "rows": sensitivity(pc, longest, locality, ours),
            "speedups": {name: speedup(pc, longest, locality, ours, name) for name in RIVALS},
        },
        "needed": {
            **about, "target": target, "rows": needed(pc, longest, locality, ours, target)
        },
        "by_locality": by_locality(
            pc, [work(args.models[0], tokens) for tokens in args.lengths], localities
        ),
        "host_memory": [
            row for each in (middle, longest) for row in host_memory(pc, each, locality, ours)
        ],
        "calibration": calibration(pc), "batches": batches(pc, locality, ours),
    }  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Ask the model, print the tables, save the result."""
    args = parse_arguments(arguments)
    localities = [ASSUMED_LOCALITY]
    if args.locality:
        localities = [read_locality(path, args.alpha) for path in args.locality.split(",")]
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "locality")}
    shown = [one if not one.removeprefix("--locality=").startswith("/") else "PATH"
             for one in arguments]  # fmt: skip
    result = Result.begin(KIND, shown, settings, seed=0, package="research")
    result.figures |= measure(args, localities)
    note = f"Simulated, not measured. Locality: {localities[0].source}"
    return closed(result, args, f"{note}\n\n{smartssd_table(result.figures)}")


if __name__ == "__main__":
    run_program(run)
