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
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_settings import parse_setting, parse_settings
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.result import Result, result_file, without_path
from penstock.evaluate.resuming import GroupedRows, check_same, grow
from penstock.evaluate.sitting import Sitting, closed
from penstock.models.loader import LoadedModel, load
from research.clusters.end_to_end import (
    measured_disk,
    pace_of,
    run_groups,
)
from research.clusters.end_to_end_run import DISK, ForcedText, Say
from research.clusters.program import model_name
from research.clusters.texts import RING_WALK, digest_of_text
from research.near_storage.decode_cases import (
    OURS,
    PLAIN,
    NearCase,
    main_cases,
    near_key,
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
_PRIVATE = ("out", "json", "resume", "minutes", "prompt_file")
_SAME = (
    "model", "text", "digest", "warm", "rounds", "steps", "threads", "chunk", "memory",
    "hot_share", "seed",
)  # fmt: skip
"""Settings that a run must share with the one that it goes on with."""
_GROWING = (
    "lengths", "alphas", "devices", "methods", "split_lengths", "split_devices", "split_alphas",
)  # fmt: skip


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range, or a device or method does not exist.
    """
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--prompt-file", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default=RING_WALK, help="whose document and right answer are the text")
    add("--lengths", default="8192,16384,32768", help="tokens of prompt and output; empty: no rows")
    add("--alphas", default="0.2,0.1", help="share of the tokens that a step selects")
    add("--devices", default=DISK, help=f"{DISK}, or simulated: {', '.join(PRESETS)}")
    add("--methods", default=";".join(METHODS), help="as in penstock bench accuracy")
    add("--memory", default="3/5", help="budget of what takes one, if it names none itself")
    add("--hot-share", type=float, default=0.4, help="hot pool of the two rows with and without a "
        "device, in what the length is; 0: none")  # fmt: skip
    add("--split-lengths", default="16384", help="tokens; empty: no rows")
    add("--split-devices", help="devices of the hot pools of many sizes, if others")
    add("--split-alphas", default="0.2", help="shares that those select")
    add("--sizes", type=int, default=9, help="hot pools, from one selection to the most")
    add("--most", type=float, default=0.8, help="of the tokens, that may be hot in them")
    add("--steps", type=int, default=24, help="measured steps of a row")
    add("--rounds", type=int, default=4, help="rounds in which the rows take turns")
    add("--warm", type=int, default=14, help="steps before; the split is solved after the eighth")
    add("--row-seconds", type=float, default=40.0, help="decode fewer steps of a row beyond this")
    add("--threads", type=int, default=1, help="of the model's own arithmetic")
    add("--chunk", type=int, default=512, help="tokens per forward pass of the prefill")
    add("--minutes", type=float, help="begin no group of rows when this much time has passed")
    add("--seed", type=int, default=0)
    add(
        "--out",
        type=result_file,
        metavar="FILE",
        help="JSON file for the result, saved as it grows",
    )
    add("--resume", action="store_true", help="go on with the result in --out")
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    args.lengths = whole_numbers(args.lengths, "--lengths", may_be_empty=True)
    args.alphas = real_numbers(args.alphas, "--alphas", may_be_empty=True)
    args.split_lengths = whole_numbers(args.split_lengths, "--split-lengths", may_be_empty=True)
    args.split_alphas = real_numbers(args.split_alphas, "--split-alphas", may_be_empty=True)
    args.devices = args.devices.split(",")
    args.split_devices = (args.split_devices or ",".join(args.devices)).split(",")
    args.methods = [setting.text for setting in parse_settings([args.methods])]
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    for device in [*args.devices, *args.split_devices]:
        if device != DISK and device not in PRESETS:
            raise ConfigError(f"no device {device!r}; choose from {DISK}, {', '.join(PRESETS)}")
    if min(args.rounds, args.chunk, args.threads) < 1 or args.steps < args.rounds:
        raise ConfigError("--rounds, --chunk and --threads count from 1 on, --steps from --rounds")
    if args.warm < 2 or args.sizes < LEAST_SIZES or not args.row_seconds > 0:
        raise ConfigError(f"--warm is at least 2, --sizes {LEAST_SIZES}, and --row-seconds above 0")
    shares = [*args.alphas, *args.split_alphas, args.most]
    if not all(0 < share < 1 for share in shares) or not 0 <= args.hot_share < 1:
        raise ConfigError("shares of the tokens are above 0 and below 1")
    least = pace_of(args).decoded + 64
    if min([*args.lengths, *args.split_lengths, least]) < least:
        raise ConfigError(f"lengths must be at least {least}: so much is decoded, and a prompt")


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
    for case in out:
        parse_setting(case.method)
    return out


class Decode:
    """All rows of a run, group by group."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read what is to be measured; nothing is loaded yet."""
        self._args = args
        self.held = GroupedRows(near_key)
        self.groups: dict[tuple[Any, ...], list[NearCase]] = {}
        for case in all_cases(args):
            self.groups.setdefault(case.group, []).append(case)

    def take_up(self, former: Result, settings: dict[str, Any]) -> None:
        """Keep what an earlier run has measured; a group that lacks rows is measured whole.

        Args:
            settings: of the result; what the earlier run was asked for is added.

        Raises:
            ConfigError: that run was another one.
        """
        check_same(former.settings, settings, _SAME)
        grow(settings, former.settings, _GROWING)
        groups = [[case.key for case in cases] for cases in self.groups.values()]
        self.held.take_up(former.figures["rows"], groups)

    def run(self, loaded: LoadedModel, keep: Callable[[], None]) -> None:
        """Measure what is left.

        Args:
            keep: called after each group.
        """
        args, pace = self._args, pace_of(self._args)

        def measure(
            group: Sequence[NearCase], text: ForcedText, say: Say, step: Callable[[int], None]
        ) -> None:
            rows = run_near_group(group, text, loaded, pace, args.row_seconds, say, step)
            self.held.put(rows, [case.key for case in group])
            self.held.rows.sort(key=section_order)
            keep()

        run_groups(self.groups.values(), self.held.done, loaded, args, measure)


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    settings = {k: v for k, v in vars(args).items() if k not in _PRIVATE}
    settings |= {"model": model_name(args.model), "text": "file" if args.prompt_file else args.task}
    settings["digest"] = digest_of_text(args.prompt_file)
    shown = without_path(arguments, "--prompt-file", args.prompt_file)
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    bench, sitting, disk = Decode(args), Sitting(result, args), None
    if sitting.former is not None:
        bench.take_up(sitting.former, result.settings)
        disk = sitting.former.figures["disk"]
    if DISK in [*args.devices, *args.split_devices] and disk is None:
        disk = measured_disk()

    def keep() -> None:
        name, rows = model_name(args.model), bench.held.rows
        sitting.keep({"model": name, "disk": disk, "rows": rows, **summary(rows)})

    try:
        bench.run(load(args.model), keep)
    finally:
        keep()
        torch.set_num_threads(threads)
    print(decode_table(result.figures))
    return closed(result, args)


if __name__ == "__main__":
    run_program(run)
