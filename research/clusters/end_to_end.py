"""`python -m research.clusters.end_to_end`: decode steps of DynaKV and what it compares with.

Source: DynaKV, sections 8.2 to 8.4 (Figs. 10b, 10c and 14, Table 6).

A real model is given a text whose last tokens are forced; everything before is prefilled once and
put into every method's cache. All methods select the same number of tokens and have room for one
selection per layer; those that are compared take turns within one run. Simulated devices lie over
memory, "auto" is the real disk.
"""

import argparse
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

from penstock.core.errors import ConfigError
from penstock.devices.measure import fit_profile
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_settings import parse_setting, parse_settings
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, result_file, without_path
from penstock.evaluate.resuming import GroupedRows, check_same, grow
from penstock.evaluate.sitting import Sitting, closed, say
from penstock.models.loader import LoadedModel, load
from penstock.storage.measured_directory import measure_directory
from research.clusters.end_to_end_merge import GROWING, KIND, SHARED, merged
from research.clusters.end_to_end_run import (
    CACHE,
    DISK,
    MAIN,
    Case,
    ForcedText,
    LiveRow,
    Pace,
    Say,
    key_of,
    run_group,
)
from research.clusters.end_to_end_table import (
    LAYER_WISE,
    NO_CLUSTERS,
    end_to_end_table,
    summary,
)
from research.clusters.program import model_name
from research.clusters.texts import RING_WALK, answer_of, digest_of_text, read_on

METHODS = (
    "full", "dynakv", "dynakv:layout=tokens", "dynakv:update=static", "pqcache", "clusterkv",
    NO_CLUSTERS,
)  # fmt: skip
REUSES = (0.0, 1.0, 2.0, 4.0)
"""Slots of the cache sweep, in selections."""
AnyCase = TypeVar("AnyCase", bound=Case)


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
    add("--lengths", default="1024,2048,4096,8192,16384", help="tokens of prompt and output")
    add("--ratios", default="0.05,0.1,0.2", help="share of the tokens that a step selects")
    add("--devices", default=f"ufs,{DISK}", help=f"{DISK}, or simulated: {', '.join(PRESETS)}")
    add("--methods", default=";".join(METHODS), help="as in penstock bench accuracy")
    add("--cache-length", type=int, default=4096, help="tokens of the cache sweep; 0: none")
    add("--cache-ratio", type=float, default=0.1, help="share that its steps select")
    add("--steps", type=int, default=48, help="measured steps of a row")
    add("--rounds", type=int, default=4, help="rounds in which the methods take turns")
    add("--warm", type=int, default=8, help="steps before the first round")
    add(
        "--threads", type=int, default=1,
        help="of the model's own arithmetic; clusters follow the output on a thread beside it",
    )  # fmt: skip
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
    add("--merge", nargs="+", metavar="FILE", default=[],
        help="measure nothing: put these results into the one in --out")  # fmt: skip
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    args.lengths = whole_numbers(args.lengths, "--lengths", may_be_empty=True)
    args.ratios = real_numbers(args.ratios, "--ratios", may_be_empty=True)
    args.devices = args.devices.split(",")
    args.methods = [setting.text for setting in parse_settings([args.methods])]
    for device in args.devices:
        if device != DISK and device not in PRESETS:
            raise ConfigError(f"no device {device!r}; choose from {DISK}, {', '.join(PRESETS)}")
    if min(args.rounds, args.warm, args.chunk, args.threads) < 1 or args.steps < args.rounds:
        raise ConfigError(
            "--rounds, --warm, --chunk and --threads count from 1 on, --steps from --rounds on"
        )
    if not all(0 < ratio < 1 for ratio in [*args.ratios, args.cache_ratio]):
        raise ConfigError("shares of the tokens are above 0 and below 1")
    if (args.resume or args.merge) and not args.out:
        raise ConfigError("--resume and --merge go on with the file of --out; name it")
    least = pace_of(args).decoded + 64
    if min([*args.lengths, args.cache_length or least]) < least:
        raise ConfigError(f"lengths must be at least {least}: so much is decoded, and a prompt")
    return args


def pace_of(args: argparse.Namespace) -> Pace:
    """Warm-up, and the measured steps spread over the rounds."""
    return Pace(warm=args.warm, rounds=args.rounds, steps=args.steps // args.rounds)


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
    for case in out:
        parse_setting(case.method)
    return out


def forced_text(loaded: LoadedModel, args: argparse.Namespace, length: int) -> ForcedText:
    """The text of one length, prefilled.

    Raises:
        PromptError: the text file is too short, or the model has too few positions.
        ConfigError: the task's answer is too short.
    """
    decoded = pace_of(args).decoded
    prompt = length - decoded
    if args.prompt_file:
        ids = read_on(loaded, args.prompt_file, prompt_tokens=prompt, output_tokens=decoded)
    else:
        ids, prompt = answer_of(
            loaded, args.task, prompt_tokens=prompt, output_tokens=decoded, seed=args.seed
        )
    if len(ids) < prompt + decoded:
        raise ConfigError(
            f"the answer of {args.task} has {len(ids) - prompt} tokens, and {decoded} are decoded; "
            "take another --task, or fewer --steps"
        )
    return ForcedText(loaded, ids, decoded, args.chunk)


class EndToEnd:
    """All rows of a run, group by group."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read what is to be measured; nothing is loaded yet."""
        self._args = args
        self.held = GroupedRows(key_of)
        self.groups: dict[tuple[Any, ...], list[Case]] = {}
        for case in all_cases(args):
            self.groups.setdefault(case.group, []).append(case)

    def take_up(self, former: Result, settings: dict[str, Any]) -> None:
        """Keep what an earlier run has measured; a group that lacks rows is measured whole.

        Args:
            settings: of the result; what the earlier run was asked for is added.

        Raises:
            ConfigError: that run was another one.
        """
        check_same(former.settings, settings, SHARED)
        grow(settings, former.settings, GROWING)
        groups = [[case.key for case in cases] for cases in self.groups.values()]
        self.held.take_up(former.figures["rows"], groups)

    def run(self, loaded: LoadedModel, keep: Callable[[], None]) -> None:
        """Measure what is left.

        Args:
            keep: called after each group.
        """
        pace = pace_of(self._args)

        def measure(
            group: Sequence[Case], text: ForcedText, say: Say, step: Callable[[int], None]
        ) -> None:
            live = [partial(LiveRow, case, text, loaded, pace) for case in group]
            rows = run_group(group, live, pace, say, step)
            self.held.put(rows, [case.key for case in group])
            keep()

        run_groups(self.groups.values(), self.held.done, loaded, self._args, measure)


def run_groups(
    groups: Collection[Sequence[AnyCase]], done: Collection[tuple[Any, ...]], loaded: LoadedModel,
    args: argparse.Namespace,
    measure: Callable[[Sequence[AnyCase], ForcedText, Say, Callable[[int], None]], None],
) -> None:  # fmt: skip
    """Measure the groups that are not done, until the time is up.

    Args:
        groups: those of one length follow on one another and share its text.
        done: keys of the rows that are there.
        measure: measures one group; as `run_group` it says what is going on and what is done.
    """
    began = time.perf_counter()
    left = [group for group in groups if group[0].key not in done]
    progress = Progress(sum(map(_work, groups)))
    progress.skip(sum(map(_work, groups)) - sum(map(_work, left)))
    text: tuple[int, ForcedText] | None = None
    for group in left:
        minutes = (time.perf_counter() - began) / 60
        if args.minutes is not None and minutes >= args.minutes:
            say(f"time is up after {minutes:.1f} minutes; --resume goes on")
            return
        length, weight = group[0].length, _work(group) // (2 * len(group))
        if text is None or text[0] != length:
            progress.say(f"prefilling {length:,} tokens")
            text = (length, forced_text(loaded, args, length))
        measure(group, text[1], progress.say, partial(_step, progress, weight))


def _step(progress: Progress, weight: int, cases: int) -> None:
    progress.step(weight * cases)


def _work(group: Sequence[Case]) -> int:
    """Work in a group, in the units of the progress lines."""
    return 2 * len(group) * (group[0].length // 1024 + 4)


def measured_disk() -> dict[str, float]:
    """The real disk as a profile: seconds of a request, bytes per second, latency."""
    say("measuring the disk")
    measured = measure_directory("auto", file_bytes=128 << 20, seconds_per_cell=0.1)
    disk = fit_profile(measured.cells, name=DISK, sector_bytes=measured.sector_bytes)
    return {"request_s": disk.request_s, "bandwidth": disk.bandwidth, "latency_s": disk.latency_s}


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    if args.merge:
        result = merged(args.out, args.merge)
        result.save(args.out)
        print(end_to_end_table(result.figures))
        return closed(result, args)
    torch.manual_seed(args.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    private = ("out", "json", "resume", "merge", "minutes", "prompt_file")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings |= {"model": model_name(args.model), "text": "file" if args.prompt_file else args.task}
    settings["digest"] = digest_of_text(args.prompt_file)
    shown = without_path(arguments, "--prompt-file", args.prompt_file)
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    bench, sitting, disk = EndToEnd(args), Sitting(result, args), None
    if sitting.former is not None:
        bench.take_up(sitting.former, result.settings)
        disk = sitting.former.figures.get("disk")
    if DISK in args.devices and disk is None:
        disk = measured_disk()

    def keep() -> None:
        name, rows = model_name(args.model), bench.held.rows
        sitting.keep({"model": name, "disk": disk, "rows": rows, **summary(rows)})

    try:
        bench.run(load(args.model), keep)
    finally:
        keep()
        torch.set_num_threads(threads)
    print(end_to_end_table(result.figures))
    return closed(result, args)


if __name__ == "__main__":
    run_program(run)
