"""`python -m research.near_storage.decode`: HillInfer's decode steps, with real processes.

Source: HillInfer, sections 5.3 and 5.4 (Figs. 12, 13 and 16b).

A real model is given a text whose last tokens are forced; everything before is prefilled once and
put into every method's cache. "main": methods that select the same number of tokens under one
budget of the main process's memory, then HillInfer with and without a near-storage device with the
same hot pool. "split": HillInfer with hot pools of many sizes beside the one that it solves for
from the rates measured in the same run. Rows that are compared take turns. Simulated devices lie
over memory, in the device process where there is one (several of them are several drives); "auto"
is the real disk.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import groupby, product
from typing import Any

import numpy as np
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import Row
from penstock.evaluate.text_table import format_table
from research.clusters.end_to_end_table import device_name
from research.clusters.steps import (
    DISK,
    MAIN,
    ForcedText,
    StepGrid,
    add_step_options,
    check_step_options,
    run_steps,
)
from research.near_storage.decode_run import (
    OURS,
    PLAIN,
    SPLIT,
    NearCase,
    main_cases,
    run_near_group,
    section_order,
    split_cases,
    without_budget,
)

# What `near_storage.decode` sums up and prints ----------------------------------------------------

NAMES = {
    "full": "all in memory", "flexgen": "FlexGen", "h2o": "H2O (drops)", "infinigen": "InfiniGen",
    "leoam": "LeoAM", OURS: "HillInfer", PLAIN: "without a device",
    f"{OURS}:devices=2": "two devices", f"{OURS}:bits=4": "INT4",
}  # fmt: skip
GOAL = 0.10
"""Measured minimum and Eq. 4's beta shall be no farther apart."""
NOTE = """A step's mean; stall: attention waiting for scores and reads; predict: scoring, choosing
and moving, beside the layer before; hot: selected tokens that were hot; in, out: tokens promoted
and demoted (a demoted one is with the device already: no bytes move); held MiB: what the main
process grew by, memory shared with devices included; devices: private memory of their processes;
right: forced tokens that the model would have said."""


def measured(rows: Sequence[Row], section: str = MAIN) -> list[Row]:
    """Rows of a section that have figures."""
    return [row for row in rows if row["section"] == section and "mean_ms" in row]


def name_of(row: Row) -> str:
    """A row's method as it is spoken of."""
    method = without_budget(row["method"])
    return NAMES.get(method, method)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Speed-ups, memory with and without a device, and the solved splits, for JSON."""
    return {"speedups": speedups(rows), "pairs": pairs(rows), "splits": splits(rows)}


# Main ---------------------------------------------------------------------------------------------


def speedups(rows: Sequence[Row]) -> list[Row]:
    """How many times faster HillInfer is than each other method under the same budget."""
    found = [row for row in measured(rows) if not row["hot"]]
    ours = {_place(row): row for row in found if without_budget(row["method"]) == OURS}
    return [
        _where(row) | {"method": row["method"], "times": row["mean_ms"] / mine["mean_ms"]}
        for row in found
        if (mine := ours.get(_place(row))) is not None and mine is not row
    ]


def pairs(rows: Sequence[Row]) -> list[Row]:
    """HillInfer beside itself without a device: under one budget, and with one hot pool."""
    out = []
    for place, some in groupby(sorted(measured(rows), key=_place), key=_place):
        del place
        held = {(bool(row["hot"]), without_budget(row["method"])): row for row in some}
        for same_pool in (False, True):
            near, plain = held.get((same_pool, OURS)), held.get((same_pool, PLAIN))
            if near is None or plain is None:
                continue
            out.append(_where(near) | {
                "same": "hot pool" if same_pool else "budget",
                "tokens_per_s": [near["tokens_per_s"], plain["tokens_per_s"]],
                "main_bytes": [near["main_bytes"], plain["main_bytes"]],
                "ledger_bytes": [near["ledger_bytes"], plain["ledger_bytes"]],
                "device_bytes": sum(near["device_bytes"]),
                "hot_tokens": [near["hot_tokens"], plain["hot_tokens"]],
                "faster": plain["mean_ms"] / near["mean_ms"],
                "memory": near["main_bytes"] / plain["main_bytes"],
            })  # fmt: skip
    return out


def _place(row: Row) -> tuple[Any, ...]:
    return row["length"], -row["ratio"], row["device"]


def _where(row: Row) -> Row:
    return {name: row[name] for name in ("device", "length", "ratio")}


# Split --------------------------------------------------------------------------------------------


def beta_of(hot: float, total: float) -> float:
    """Hot tokens per cold token."""
    return hot / (total - hot) if total > hot else math.inf


def splits(rows: Sequence[Row]) -> list[Row]:
    """The solved hot pool beside the measured best one, for each place.

    Times between the measured pools are read off the straight lines between them. `solved` is what
    the row that solves for itself had as hot pool, the median over its rounds. `best` is the
    pool with the least median; `smooth` the minimum of a parabola through all of them, which one
    odd point does not move, within what was measured.
    """
    out = []
    for _, some in groupby(sorted(measured(rows, SPLIT), key=_place), key=_place):
        found = list(some)
        fixed = sorted((row for row in found if row["hot"]), key=lambda row: row["hot"])
        solved = [row for row in found if not row["hot"] and "split" in row]
        if len(fixed) < 3 or not solved:
            continue
        out.append(_where(fixed[0]) | _compared(fixed, solved[0]))
    return out


def _compared(fixed: Sequence[Row], solved: Row) -> Row:
    hot = np.array([row["hot"] for row in fixed], dtype=np.float64)
    times = np.array([row["median_ms"] for row in fixed])
    total = solved["split"]["hot_tokens"] + solved["split"]["cold_tokens"]
    best = int(times.argmin())
    smooth = smooth_minimum(hot, times)

    def at(tokens: float) -> Row:
        return {
            "hot_tokens": tokens, "beta": beta_of(tokens, total),
            "ms": float(np.interp(tokens, hot, times)),
        }  # fmt: skip

    chosen = at(float(np.median(solved["round_capacity"])))
    eq4 = at(solved["eq4"]["hot_tokens"])
    least = float(times[best])
    return {
        "total_tokens": total, "most_hot": solved["most_hot"], "rates": solved["rates"],
        "best": at(float(hot[best])), "smooth": at(smooth), "solved": chosen, "eq4": eq4,
        "eq4_skewed": at(solved["eq4_skewed"]["hot_tokens"]),
        "eq4_beta_unbounded": solved["eq4_beta"],
        "solved_ms": solved["median_ms"],
        "latency_off": chosen["ms"] / least - 1, "eq4_latency_off": eq4["ms"] / least - 1,
        "own_latency_off": solved["median_ms"] / least - 1,
        "beta_off": beta_of(float(hot[best]), total) / chosen["beta"] - 1,
        "smooth_beta_off": beta_of(smooth, total) / chosen["beta"] - 1,
        "eq4_beta_off": beta_of(float(hot[best]), total) / eq4["beta"] - 1,
    }  # fmt: skip


def smooth_minimum(x: Any, y: Any) -> float:
    """Where a parabola through all points is least, within them."""
    square, slope, _ = np.polyfit(x, y, 2)
    if square <= 0:
        return float(x[0] if y[0] < y[-1] else x[-1])
    return float(np.clip(-slope / (2 * square), x[0], x[-1]))


# Tables -------------------------------------------------------------------------------------------


def decode_table(figures: dict[str, Any]) -> str:
    """All tables that the figures are enough for."""
    rows = figures["rows"]
    parts = [_rows(rows, MAIN), _pairs(figures["pairs"])]
    parts += [_rows(rows, SPLIT), _splits(figures["splits"])]
    return "\n\n".join(part for part in parts if part)


def _rows(rows: Sequence[Row], section: str) -> str:
    header = ["device, tokens, share, method", "ms/step", "median", "p90", "tok/s", "stall ms",
              "predict", "hot", "in", "out", "in KiB", "reads", "MiB", "pool", "held MiB",
              "ledger", "devices", "right"]  # fmt: skip
    lines = []
    for row in rows:
        if row["section"] != section:
            continue
        name = f"{row['device']} {row['length']:6,} {row['ratio']:4.0%}  {name_of(row)}"
        if row["hot"]:
            name += f", {row['hot']:,} hot"
        lines.append([name, row["error"]] if "error" in row else [name, *_cells(row)])
    return f"{format_table(header, lines)}\n{NOTE}" if lines else ""


def _cells(row: Row) -> list[str]:
    devices = row["device_bytes"]
    return [
        f"{row['mean_ms']:.1f}", f"{row['median_ms']:.1f}", f"{row['p90_ms']:.1f}",
        f"{row['tokens_per_s']:.1f}", f"{row['stall_ms']:.1f}", f"{row['select_ms']:.1f}",
        "-" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
        f"{row['promoted']:,.0f}", f"{row['demoted']:,.0f}",
        f"{row['promoted_bytes'] / 1024:,.0f}", f"{row['reads']:,.0f}",
        f"{row['read_bytes'] / 2**20:.2f}", f"{row['slots']:,}",
        f"{row['main_bytes'] / 2**20:.1f}", f"{row['ledger_bytes'] / 2**20:.1f}",
        "+".join(f"{size / 2**20:.0f}" for size in devices) or "-", f"{row['right']:.0%}",
    ]  # fmt: skip


def _pairs(found: Sequence[Row]) -> str:
    header = ["with a device : without", "the same", "tok/s", "", "times faster", "main MiB", "",
              "share", "devices MiB", "hot tokens", ""]  # fmt: skip
    lines = [
        [
            f"{device_name(one['device'])}, {one['length']:,} tokens, {one['ratio']:.0%}",
            one["same"], *(f"{value:.1f}" for value in one["tokens_per_s"]),
            f"{one['faster']:.2f}", *(f"{value / 2**20:.1f}" for value in one["main_bytes"]),
            f"{one['memory']:.0%}", f"{one['device_bytes'] / 2**20:.0f}",
            *(f"{value:,.0f}" for value in one["hot_tokens"]),
        ]
        for one in found
    ]  # fmt: skip
    return format_table(header, lines) if lines else ""


def _splits(found: Sequence[Row]) -> str:
    header = ["hot pool (fig. 16b)", "tokens", "beta", "ms", "over the least", "beta off"]
    lines = []
    for one in found:
        name = f"{device_name(one['device'])}, {one['length']:,}, {one['ratio']:.0%}"
        lines.append([f"{name}: measured best", *_spot(one["best"]), "", ""])
        lines.append([f"{name}: by a parabola", *_spot(one["smooth"]), "", ""])
        lines.append([
            f"{name}: solved", *_spot(one["solved"]), f"{one['latency_off']:+.0%}",
            f"{one['beta_off']:+.0%}",
        ])  # fmt: skip
        lines.append([
            f"{name}: Eq. 4", *_spot(one["eq4"]), f"{one['eq4_latency_off']:+.0%}",
            f"{one['eq4_beta_off']:+.0%}",
        ])  # fmt: skip
    if lines:
        lines.append([f"goal: no more than {GOAL:.0%} off", ""])
    return format_table(header, lines) if lines else ""


def _spot(spot: Row) -> list[str]:
    return [f"{spot['hot_tokens']:,.0f}", f"{spot['beta']:.2f}", f"{spot['ms']:.1f}"]


# HillInfer's decode steps, with real processes ----------------------------------------------------

KIND = "near_storage.decode"
METHODS = (
    "full", "flexgen", "h2o", "infinigen", "leoam", OURS, PLAIN, f"{OURS}:devices=2",
    f"{OURS}:bits=4",
)  # fmt: skip
LEAST_SIZES = 3


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add_step_options(parser, methods=METHODS, devices=DISK, steps=24, warm=14)
    add("--lengths", default="8192,16384,32768", help="tokens of prompt and output; empty: no rows")
    add("--alphas", default="0.2,0.1", help="share of the tokens that a step selects")
    add("--memory", default="3/5", help="budget of what takes one, if it names none itself")
    add("--hot-share", type=float, default=0.4, help="hot pool of the two rows with and without a "
        "device, in what the length is; 0: none")  # fmt: skip
    add("--split-lengths", default="16384", help="tokens; empty: no rows")
    add("--split-devices", help="devices of the hot pools of many sizes, if others")
    add("--split-alphas", default="0.2", help="shares that those select")
    add("--sizes", type=int, default=9, help="hot pools, from one selection to the most")
    add("--most", type=float, default=0.8, help="of the tokens, that may be hot in them")
    add("--row-seconds", type=float, default=40.0, help="decode fewer steps of a row beyond this")
    args = read_options(parser, arguments)
    args.lengths = whole_numbers(args.lengths, "--lengths", may_be_empty=True)
    args.alphas = real_numbers(args.alphas, "--alphas", may_be_empty=True)
    args.split_lengths = whole_numbers(args.split_lengths, "--split-lengths", may_be_empty=True)
    args.split_alphas = real_numbers(args.split_alphas, "--split-alphas", may_be_empty=True)
    args.devices = args.devices.split(",")
    args.split_devices = (args.split_devices or ",".join(args.devices)).split(",")
    args.methods = [setting.text for setting in parse_settings([args.methods])]
    if args.warm < 2 or args.sizes < LEAST_SIZES or not args.row_seconds > 0:
        raise ConfigError(f"--warm is at least 2, --sizes {LEAST_SIZES}, and --row-seconds above 0")
    if not 0 <= args.hot_share < 1:
        raise ConfigError("--hot-share is from 0 on and below 1")
    check_step_options(
        args, [*args.devices, *args.split_devices], [*args.alphas, *args.split_alphas, args.most],
        [*args.lengths, *args.split_lengths],
    )  # fmt: skip
    return args


def all_cases(args: argparse.Namespace) -> list[NearCase]:
    """Every row; those of one group follow on one another, and so do those of one length."""
    out: list[NearCase] = []
    for length in sorted({*args.lengths, *args.split_lengths}):
        if length in args.lengths:
            for device, alpha in product(args.devices, args.alphas):
                out += main_cases(
                    args.methods, device=device, length=length, alpha=alpha, memory=args.memory,
                    hot_share=args.hot_share,
                )  # fmt: skip
        if length in args.split_lengths:
            for device, alpha in product(args.split_devices, args.split_alphas):
                out += split_cases(
                    device=device, length=length, alpha=alpha, sizes=args.sizes, most=args.most
                )
    return out


class Decode(StepGrid[NearCase]):
    """Methods under one budget, and HillInfer with hot pools of many sizes."""

    SHARED = (
        "model", "text", "digest", "warm", "rounds", "steps", "threads", "chunk", "memory",
        "hot_share", "seed",
    )  # fmt: skip
    GROWING = (
        "lengths", "alphas", "devices", "methods", "split_lengths", "split_devices",
        "split_alphas",
    )  # fmt: skip
    KEY = ("section", "device", "length", "ratio", "method", "reuse", "hot")

    @override
    def measure_group(
        self, group: Sequence[NearCase], text: ForcedText, progress: Progress,
        step: Callable[[int], None],
    ) -> list[Row]:  # fmt: skip
        seconds = self._args.row_seconds
        return run_near_group(group, text, self.loaded, self.pace, seconds, progress.say, step)

    @override
    def summary(self) -> Row:
        self.held.rows.sort(key=section_order)
        return summary(self.rows)

    @override
    def report(self) -> str:
        return decode_table(self.figures())


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result."""
    args = parse_arguments(arguments)
    return run_steps(KIND, Decode, all_cases(args), arguments, args)


if __name__ == "__main__":
    run_program(run)
