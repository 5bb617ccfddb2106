"""`python -m research.clusters.end_to_end`: decode steps of DynaKV and what it compares with.

Source: DynaKV, sections 8.2 to 8.4 (Figs. 10b, 10c and 14, Table 6).

A real model is given a text whose last tokens are forced; everything before is prefilled once and
put into every method's cache. All methods select the same number of tokens and have room for one
selection per layer; those that are compared take turns within one run. Simulated devices lie over
memory, "auto" is the real disk.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
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
from penstock.evaluate.sitting import closed
from research.clusters.end_to_end_table import (
    GROWING,
    KIND,
    LAYER_WISE,
    NO_CLUSTERS,
    SHARED,
    end_to_end_table,
    merged,
    summary,
)
from research.clusters.steps import (
    CACHE,
    DISK,
    MAIN,
    Case,
    ForcedText,
    LiveRow,
    StepGrid,
    add_step_options,
    check_step_options,
    run_group,
    run_steps,
)

METHODS = (
    "full", "dynakv", "dynakv:layout=tokens", "dynakv:update=static", "pqcache", "clusterkv",
    NO_CLUSTERS,
)  # fmt: skip
REUSES = (0.0, 1.0, 2.0, 4.0)
"""Slots of the cache sweep, in selections."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add_step_options(parser, methods=METHODS, devices=f"ufs,{DISK}", steps=48, warm=8)
    add("--lengths", default="1024,2048,4096,8192,16384", help="tokens of prompt and output")
    add("--ratios", default="0.05,0.1,0.2", help="share of the tokens that a step selects")
    add("--cache-length", type=int, default=4096, help="tokens of the cache sweep; 0: none")
    add("--cache-ratio", type=float, default=0.1, help="share that its steps select")
    add("--merge", nargs="+", metavar="FILE", default=[],
        help="measure nothing: put these results into the one in --out")  # fmt: skip
    args = read_options(parser, arguments)
    args.lengths = whole_numbers(args.lengths, "--lengths", may_be_empty=True)
    args.ratios = real_numbers(args.ratios, "--ratios", may_be_empty=True)
    args.devices = args.devices.split(",")
    args.methods = [setting.text for setting in parse_settings([args.methods])]
    if args.merge and not args.out:
        raise ConfigError("--merge goes on with the file of --out; name it")
    lengths = [*args.lengths, *([args.cache_length] if args.cache_length else [])]
    check_step_options(args, args.devices, [*args.ratios, args.cache_ratio], lengths)
    return args


def cache_methods() -> list[tuple[str, float]]:
    """The rows of the cache sweep: settings, and slots in selections."""
    out = [("dynakv", 0.0)]
    for reuse in REUSES[1:]:
        out += [
            (f"dynakv:prefers_small={small},updated_share={share}", reuse)
            for small, share in product(("true", "false"), ("0.25", "0"))
        ]
        out += [(method, reuse) for method in LAYER_WISE]
    return out


def all_cases(args: argparse.Namespace) -> list[Case]:
    """Every row; those of one group follow on one another, and so do those of one length."""
    lengths = sorted({*args.lengths, *([args.cache_length] if args.cache_length else [])})
    out = []
    for length, device in product(lengths, args.devices):
        if length in args.lengths:
            out += [
                Case(section=MAIN, device=device, length=length, ratio=ratio, method=method)
                for ratio, method in product(args.ratios, args.methods)
            ]
        if length == args.cache_length:
            out += [
                Case(
                    section=CACHE, device=device, length=length, ratio=args.cache_ratio,
                    method=method, reuse=reuse,
                )
                for method, reuse in cache_methods()
            ]  # fmt: skip
    return out


class EndToEnd(StepGrid[Case]):
    """Methods beside each other, and DynaKV with caches of several sizes."""

    SHARED, GROWING = SHARED, GROWING
    KEY = ("section", "device", "length", "ratio", "method", "reuse")

    @override
    def measure_group(
        self, group: Sequence[Case], text: ForcedText, progress: Progress,
        step: Callable[[int], None],
    ) -> list[Row]:  # fmt: skip
        live = [partial(LiveRow, case, text, self.loaded, self.pace) for case in group]
        return run_group(group, live, self.pace, progress.say, step)

    @override
    def summary(self) -> Row:
        return summary(self.rows)

    @override
    def report(self) -> str:
        return end_to_end_table(self.figures())


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result."""
    args = parse_arguments(arguments)
    if args.merge:
        result = merged(args.out, args.merge)
        return closed(result, args, end_to_end_table(result.figures))
    return run_steps(KIND, EndToEnd, all_cases(args), arguments, args)


if __name__ == "__main__":
    run_program(run)
