"""`penstock bench accuracy`: what a memory budget costs in right answers."""

import argparse
import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.atomic_write import require_own
from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_cells import (
    REFERENCE,
    TIME_WAS_UP,
    Cell,
    accuracy_table,
    not_run,
    summarise,
)
from penstock.evaluate.accuracy_fidelity import rows_at_a_time
from penstock.evaluate.accuracy_jobs import Examination, Examiner, Job
from penstock.evaluate.accuracy_settings import (
    PAPER_SUITE,
    REAL_POLICIES,
    at_fractions,
    parse_settings,
)
from penstock.evaluate.accuracy_workers import default_workers, run_here, run_jobs
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.real_table import basis_line, fidelity_of, real_report
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same, digest_of
from penstock.evaluate.sitting import Sitting, sit
from penstock.evaluate.tasks.real.passages import FIDELITY
from penstock.generation.prompts import read_text_file
from penstock.models.loader import BUNDLED, WEIGHTS

_SAME_WHEN_RESUMED = (
    "model", "device", "dtype", "weights", "texts", "batch", "chunk", "own_prefill", "chat",
    "adapter_tokens",
)  # fmt: skip
_LEGEND = """
loss: points lost to full attention, the mean over tasks, with its 95 % interval (the samples
are the same for every setting). memory: fast memory of one batch's cache."""
KEEP_S = 15.0
"""A long job is saved this often."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="penstock bench accuracy", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, or a folder")
    add(
        "--suite", choices=["paper", "real"],
        help="paper: every method at 1/13 and 1/34 of the full cache; real: pretrained models "
        "(--model), asked through their chat template in books and source code, and fidelity",
    )  # fmt: skip
    add("--data", help="JSONL file or folder (context, question, answers) instead of own tasks")
    add(
        "--haystack", action="append", default=[], metavar="FILE",
        help="UTF-8 text that English tasks are hidden in, instead of made-up prose; repeatable",
    )  # fmt: skip
    add("--chat", action="store_true", help="ask through the tokenizer's chat template")
    add(
        "--tasks", default="all",
        help="names separated by commas; all: of the recall tasks, what the bundled model answers",
    )  # fmt: skip
    add(
        "--tokens", "--lengths",
        help="lengths of the prompts (default 16384; suite paper 8192,16384; suite real "
        "4096,8192, on CUDA 16384,30000 too)",
    )  # fmt: skip
    add(
        "--samples", type=int,
        help="of each task (default 50; suite paper 2, on CUDA 16; suite real 4, on CUDA 24)",
    )  # fmt: skip
    add(
        "--settings", "--policies", action="append",
        help="POLICY@BUDGET:option=value,... separated by commas; or: ablations",
    )  # fmt: skip
    add(
        "--fractions",
        help="budgets of policies that name none, separated by commas (suite real: 1/13)",
    )  # fmt: skip
    add("--figure", help="draw losses and fidelity of suite real: PNG, SVG or PDF by its ending")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", help="of weights and cache (default: as stored)")
    add("--weights", dest="packed", choices=list(WEIGHTS), help="pack them so (CPU)")
    add("--batch", type=int, help="samples answered at a time (default 10; suite: all)")
    add("--workers", type=int, help="processes, each with the model (default 1; suite: by cores)")
    add("--chunk", type=int, default=2048, help="tokens per forward pass of the prompt")
    add("--own-prefill", action="store_true", help="prefill through each setting's own cache")
    add(
        "--disk", dest="store",
        help="directory of the caches, or memory (default: auto; suite real on CUDA: memory)",
    )  # fmt: skip
    args = read_options(
        parser, arguments,
        renamed={"--store": "--disk"},
    )  # fmt: skip
    _fill_in(args)
    if min(args.samples, args.batch, args.chunk, args.workers) < 1:
        raise ConfigError("--samples, --batch, --chunk and --workers must be at least 1")
    return args


def _fill_in(args: argparse.Namespace) -> None:
    """Defaults, which the suites have of their own.

    Raises:
        ConfigError: --model, --figure or a number cannot be used.
    """
    on_cpu, suite = args.device == "cpu", args.suite
    samples = {None: 50, "paper": 2 if on_cpu else 16, "real": 4 if on_cpu else 24}[suite]
    tokens = {
        None: "16384", "paper": "8192,16384",
        "real": "4096,8192" if on_cpu else "4096,8192,16384,30000",
    }[suite]  # fmt: skip
    if suite == "real":
        if args.model == BUNDLED:
            raise ConfigError("--suite real asks a pretrained model; name one with --model")
        if args.data or args.haystack:
            raise ConfigError("--suite real has texts of its own; leave out --data and --haystack")
        args.chat = True
        args.settings = at_fractions(
            args.settings or list(REAL_POLICIES), (args.fractions or "1/13").split(",")
        )
    elif args.fractions and args.settings:
        args.settings = at_fractions(args.settings, args.fractions.split(","))
    elif args.fractions or args.figure:
        raise ConfigError("--fractions needs --settings, and --figure needs --suite real")
    if args.figure:
        _check_figure(Path(args.figure))
    args.samples = samples if args.samples is None else args.samples
    if args.batch is None:
        args.batch = {None: 10, "paper": min(args.samples, 16), "real": args.samples}[suite]
    if args.workers is None:
        args.workers = default_workers(args.device) if suite == "paper" else 1
    args.tokens = whole_numbers(args.tokens or tokens, "--tokens")
    if args.store is None:
        args.store = "auto" if on_cpu or suite != "real" else "memory"


def _check_figure(path: Path) -> None:
    """Refuse a picture that could not be drawn behind the work.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--figure needs matplotlib: pip install 'penstock[bench]'")
    from penstock.evaluate.figure_style import PICTURE, check_kind

    check_kind(path)
    require_own(path, PICTURE, "--figure")


def _chosen(text: str, names: Sequence[str], default: Sequence[str]) -> list[str]:
    """Tasks by a text of names, in which "all" stands for the default ones.

    Raises:
        ConfigError: there is none of that name.
    """
    tasks: dict[str, None] = {}
    for word in text.split(","):
        if word not in names and word != "all":
            raise ConfigError(f"no task is called {word!r}; there are {', '.join(names)}")
        tasks |= dict.fromkeys([word] if word in names else default)
    return list(tasks)


class Benchmark:
    """All cells of one run, and the jobs that fill them."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model and read the settings.

        Raises:
            ConfigError: a task or a setting does not exist.
            ModelLoadError: the model cannot be loaded.
        """
        self._args = args
        texts = list(args.settings or [])
        if args.suite == "paper":
            texts.extend(PAPER_SUITE)
        self.settings = parse_settings(texts or ["full,kvswap@1/13,kvswap@1/34"])
        self._how = Examination(
            model=args.model, device=args.device, dtype=args.dtype, data=args.data,
            haystack=tuple(read_text_file(path, "haystack") for path in args.haystack),
            chat=args.chat, chunk=args.chunk, own_prefill=args.own_prefill, store=args.store,
            seed=args.seed, real=args.suite == "real", packed=args.packed,
        )  # fmt: skip
        alone = args.workers == 1
        here = Examiner(self._how if alone else dataclasses.replace(self._how, device="cpu"))
        self.weights, self._texts = here.weights, here.texts
        self._adapter_tokens = here.adapter_tokens if args.suite == "real" else None
        names = list(here.tasks)
        self._examiner = here if alone else None  # the workers have models of their own
        tasks = _chosen(args.tasks, names, here.default_tasks)
        self.cells = [
            Cell(length=length, task=task, setting=setting.text)
            for length in args.tokens
            for setting in self.settings
            for task in tasks
        ]
        self._at = {cell.key: cell for cell in self.cells}
        self._groups = [(length, task) for length in args.tokens for task in tasks]

    def settings_of(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The command line's settings, with what they came to."""
        args = self._args
        texts = [args.data] if args.data else args.haystack
        tokens = args.tokens[0] if len(args.tokens) == 1 else args.tokens
        self._settings = settings | {
            "weights": self.weights, "texts": self._texts or digest_of(texts), "tokens": tokens,
            "settings": [setting.text for setting in self.settings],
            "adapter_tokens": self._adapter_tokens,
        }  # fmt: skip
        return self._settings

    def take_up(self, former: Result) -> None:
        """Go on with what an interrupted run has answered.

        Raises:
            ConfigError: that run asked for something else, or for cells that would be lost.
        """
        check_same(former.settings, self._settings, _SAME_WHEN_RESUMED)
        for plain in former.figures["cells"]:
            cell = Cell(**plain)
            if cell.key in self._at:
                self._at[cell.key].__dict__.update(cell.__dict__)
            elif cell.scores:
                raise ConfigError(
                    f"cannot resume: the result has {cell.setting}, {cell.task}, {cell.length} "
                    "tokens, which this command leaves out"
                )

    def figures(self) -> dict[str, Any]:
        """Cells, their summary, and what was not run."""
        figures = figures_of(self.cells, self._args.samples)
        if self._args.suite == "real":
            figures["fidelity"] = [dataclasses.asdict(one) for one in fidelity_of(self.cells)]
        return {**figures, "shared_prefill": not self._args.own_prefill}

    def report(self) -> str:
        """The table, what its columns mean, and what was not run."""
        lines = not_run_lines(not_run(self.cells, self._args.samples))
        if self._args.suite == "real":
            basis = basis_line(self._adapter_tokens)
            report = real_report(self.cells, Path(self._args.model).name)
            return "\n".join([report, basis, *lines])
        return "\n".join([accuracy_table(self.cells), _LEGEND, *lines])

    def run(self, sitting: Sitting) -> None:
        """Answer everything, or as much as the time allows; saved after every job and `KEEP_S`."""
        args = self._args
        pieces = len(self.settings) * args.samples
        progress = Progress(sum(length * pieces for length, _ in self._groups))
        for cell in self.cells:
            progress.skip(cell.length * (args.samples if cell.refused else len(cell.scores)))
        chains = [self._jobs(length, task) for length, task in self._groups]
        kept = time.perf_counter()

        def take(job: Job, part: Cell) -> None:
            nonlocal kept
            cell = self._at[part.key]
            if cell.refused:
                return  # whatever a later, smaller batch may do: samples are paired
            if part.refused:
                progress.skip(cell.length * (args.samples - len(cell.scores)))
                progress.say(f"{job.title}: {part.setting} is refused")
            else:
                progress.step(cell.length * len(part.scores))
                progress.say(f"{job.title}: {part.setting} took {part.seconds:.1f} s")
            cell.merge(part)
            if time.perf_counter() - kept > KEEP_S:
                sitting.keep(self.figures())
                kept = time.perf_counter()

        def tell(job: Job, what: str) -> None:
            progress.say(f"{job.title}: {what}")

        def done(job: Job) -> None:
            sitting.keep(self.figures())

        def going_on() -> bool:
            return not sitting.time_is_up()

        if self._examiner is not None:
            run_here(chains, self._examiner, take, done, going_on, tell)
        else:
            if args.suite != "real":  # whose first tasks are the longest, and the most telling
                chains = _longest_first(chains)
            run_jobs(chains, self._how, args.workers, take, done, going_on, tell)

    def _jobs(self, length: int, task: str) -> list[Job]:
        """Batches of the samples that a setting lacks; each begins behind those that it has."""
        args = self._args
        jobs = []
        batch = args.batch
        if task in FIDELITY:
            batch = min(batch, rows_at_a_time(args.device))
        for first in range(0, args.samples, batch):
            end = min(first + batch, args.samples)
            left: dict[int, list[str]] = {}
            for setting in self.settings:
                cell = self._at[length, task, setting.text]
                if cell.refused is None and len(cell.scores) < end:
                    left.setdefault(max(first, len(cell.scores)), []).append(setting.text)
            jobs += [
                Job(
                    length=length,
                    task=task,
                    first=at,
                    count=end - at,
                    settings=tuple(texts),
                    said=self._said(length, task, at, end),
                )
                for at, texts in sorted(left.items())
            ]
        return jobs

    def _said(self, length: int, task: str, first: int, end: int) -> tuple[str, ...] | None:
        """What full attention has answered to these samples; None where it has not, to all."""
        cell = self._at.get((length, task, REFERENCE))
        said = [] if cell is None else cell.said[first:end]
        return tuple(said) if said and len(said) == end - first else None


def _longest_first(chains: Sequence[list[Job]]) -> list[list[Job]]:
    """Chains by falling length; of one length the later tasks first: their answers are longer, and
    must not be begun last."""
    numbered = [(chain[0].length, number, chain) for number, chain in enumerate(chains) if chain]
    return [chain for _, _, chain in sorted(numbered, key=lambda item: item[:2], reverse=True)]


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    private = ("out", "store", "json", "data", "haystack", "resume", "figure")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings |= {"model": Path(args.model).name, "haystack": len(args.haystack)}
    result = Result.begin("accuracy", arguments, settings, seed=args.seed, store=args.store)
    sitting, benchmark = Sitting(result, args), Benchmark(args)
    result.settings = benchmark.settings_of(settings)
    sit(sitting, benchmark, args)
    if args.figure:
        from penstock.evaluate.real_figure import write_real_figure

        write_real_figure(result, Path(args.figure))
    return result


def figures_of(cells: Sequence[Cell], samples: int) -> dict[str, Any]:
    """Plain data for the result file."""
    return {
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "summary": [dataclasses.asdict(summary) for summary in summarise(cells)],
        "not_run": not_run(cells, samples),
    }


def not_run_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What is missing, one line for each length, setting and number of samples.

    Settings that no task could run stand in the table with the reason.
    """
    groups: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["length"], cell["setting"], cell["samples"]), []).append(cell)
    return [
        f"not run: {setting}, {', '.join(cell['task'] for cell in group)}: {samples} of "
        f"{group[0]['wanted']} samples of {length:,} tokens ({group[0]['why']})"
        for (length, setting, samples), group in groups.items()
        if samples or group[0]["why"] == TIME_WAS_UP
    ]


if __name__ == "__main__":
    run_program(run)
