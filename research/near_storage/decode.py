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
from collections.abc import Callable, Sequence
from itertools import product

from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import Row
from research.clusters.end_to_end_run import DISK, ForcedText
from research.clusters.step_grid import StepGrid, add_step_options, check_step_options, run_steps
from research.near_storage.decode_cases import (
    OURS,
    PLAIN,
    NearCase,
    main_cases,
    section_order,
    split_cases,
)
from research.near_storage.decode_run import run_near_group
from research.near_storage.decode_table import decode_table, summary

KIND = "near_storage.decode"
METHODS = (
    "full", "flexgen", "h2o", "infinigen", "leoam", OURS, PLAIN, f"{OURS}:devices=2",
    f"{OURS}:bits=4",
)  # fmt: skip
LEAST_SIZES = 3


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range, or a device or method does not exist.
    """
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
    """Measure, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    return run_steps(KIND, Decode, all_cases(args), arguments, args)


if __name__ == "__main__":
    run_program(run)
