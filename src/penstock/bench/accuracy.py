"""`penstock bench accuracy`: what a memory budget costs in right answers."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.accuracy_cells import (
    Cell,
    accuracy_table,
    not_run,
    summarise,
)
from penstock.bench.accuracy_settings import PAPER_SUITE, Setting, parse_settings
from penstock.bench.answers import SharedPrefill, answer, ask
from penstock.bench.progress import Progress
from penstock.bench.result import Result
from penstock.bench.tasks import FileTasks, GeneratedTasks, TaskSource
from penstock.core.errors import BudgetError, ConfigError, PenstockError
from penstock.models.loader import LoadedModel, load


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="penstock bench accuracy", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, or a folder")
    add("--suite", choices=["paper"], help="every method at 1/13 and 1/34 of the full cache")
    add("--data", help="JSONL file or folder (context, question, answers) instead of own tasks")
    add("--chat", action="store_true", help="ask through the tokenizer's chat template")
    add("--tasks", default="all", help="names separated by commas")
    add("--tokens", type=int, default=16384, help="length of the prompts")
    add("--samples", type=int, default=50, help="of each task")
    add(
        "--settings", action="append",
        help="POLICY@BUDGET:option=value,... separated by commas; or: ablations",
    )  # fmt: skip
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", help="of weights and cache (default: as stored)")
    add("--batch", type=int, default=10, help="samples answered at a time")
    add("--chunk", type=int, default=2048, help="tokens per forward pass of the prompt")
    add("--own-prefill", action="store_true", help="prefill through each setting's own cache")
    add("--store", default="auto", help="directory of the caches, or memory")
    add("--minutes", type=float, help="stop cleanly when this much time has passed")
    add("--seed", type=int, default=0)
    add("--out", help="file for the result (benchmarks/results/NAME.json), saved as it grows")
    add("--resume", action="store_true", help="go on with the result in --out")
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    if min(args.samples, args.batch, args.chunk) < 1:
        raise ConfigError("--samples, --batch and --chunk must be at least 1")
    return args


class Benchmark:
    """All cells of one run; a batch of every task in turn, so that a time limit is fair."""

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
        self._loaded: LoadedModel = load(args.model, dtype=args.dtype, device=args.device)
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer")
        self._source: TaskSource
        if args.data:
            self._source = FileTasks(args.data, tokenizer, chat=args.chat)
        else:
            self._source = GeneratedTasks(tokenizer, chat=args.chat)
        names = list(self._source.names)
        self._tasks = names if args.tasks == "all" else args.tasks.split(",")
        for task in self._tasks:
            if task not in names:
                raise ConfigError(f"no task is called {task!r}; there are {', '.join(names)}")
        self.cells = [Cell(task=t, setting=s.text) for s in self.settings for t in self._tasks]

    def take_up(self, result: Result) -> None:
        """Go on with what an interrupted run has answered.

        Raises:
            ConfigError: that run asked for something else.
        """
        for name in ("tokens", "batch", "chunk", "dtype", "own_prefill", "chat"):
            if result.settings.get(name) != getattr(self._args, name):
                raise ConfigError(
                    f"cannot resume: the result was made with {name}={result.settings.get(name)}"
                )
        if result.seed != self._args.seed:
            raise ConfigError(f"cannot resume: the result was made with seed={result.seed}")
        done = {(cell["task"], cell["setting"]): cell for cell in result.figures["cells"]}
        self.cells = [
            Cell(**done[cell.task, cell.setting]) if (cell.task, cell.setting) in done else cell
            for cell in self.cells
        ]

    def run(self, keep: Callable[[], None] = lambda: None) -> None:
        """Answer everything, or as much as the time allows.

        Args:
            keep: called after every batch of a task, to save what there is.
        """
        args, began = self._args, time.perf_counter()
        batches = [
            (first, min(args.batch, args.samples - first), task)
            for first in range(0, args.samples, args.batch)
            for task in self._tasks
        ]
        progress = Progress(sum(count for _, count, _ in batches) * len(self.settings))
        for first, count, task in batches:
            spent = (time.perf_counter() - began) / 60
            if args.minutes is not None and spent > args.minutes:
                _say(f"time is up after {spent:.1f} minutes")
                return
            self._answer(task, first, count, progress)
            keep()

    def _answer(self, task: str, first: int, count: int, progress: Progress) -> None:
        args = self._args
        left = []
        for setting in self.settings:
            cell = self._cell(task, setting)
            if cell.refused is not None or len(cell.scores) >= first + count:
                progress.skip(count)
            else:
                left.append(setting)
        samples = []
        if left:
            samples = self._source.draw(task, first, count, tokens=args.tokens, seed=args.seed)
        if not samples:
            progress.skip(count * len(left))
            return
        question = ask(self._loaded, samples)
        shared = None
        if not args.own_prefill:
            progress.say(f"{task} {first + 1} to {first + len(samples)}: reading the prompts")
            shared = SharedPrefill(self._loaded.model, question, args.chunk)
        for setting in left:
            cell = self._cell(task, setting)
            progress.say(f"{task} {first + 1} to {first + len(samples)}: {setting.text}")
            try:
                answers = answer(
                    self._loaded, question, setting, chunk=args.chunk, shared=shared,
                    store=args.store,
                )  # fmt: skip
            except BudgetError as error:
                cell.refused = str(error)
            else:
                cell.add(question, answers)
            progress.step(count)

    def _cell(self, task: str, setting: Setting) -> Cell:
        return next(c for c in self.cells if c.task == task and c.setting == setting.text)


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it.

    Raises:
        PenstockError: bad input, or no room for the caches.
    """
    args = parse_arguments(arguments)
    private = ("out", "store", "json", "model", "data", "resume")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    result = Result.begin("accuracy", arguments, settings, seed=args.seed, store=args.store)
    benchmark = Benchmark(args)
    result.settings["settings"] = [setting.text for setting in benchmark.settings]
    began, minutes = time.perf_counter(), 0.0
    if args.resume and args.out and Path(args.out).exists():
        former = Result.load(args.out)
        benchmark.take_up(former)
        minutes = former.figures["minutes"]

    def keep() -> None:
        result.figures = figures_of(benchmark.cells, args.samples)
        result.figures["minutes"] = minutes + (time.perf_counter() - began) / 60
        result.figures["shared_prefill"] = not args.own_prefill
        if args.out:
            result.save(args.out)

    interrupted = False
    try:
        benchmark.run(keep)
    except KeyboardInterrupt:
        interrupted = True
    keep()
    print(accuracy_table(benchmark.cells))
    print(
        "\nloss: points lost to full attention, the mean over tasks, with its 95 % interval (the "
        "samples\nare the same for every setting). memory: fast memory of one batch's cache."
    )
    for line in not_run_lines(result.figures["not_run"]):
        print(line)
    if args.json:
        print(json.dumps(result.as_dict()))
    if interrupted:
        raise KeyboardInterrupt
    return result


def figures_of(cells: Sequence[Cell], samples: int) -> dict[str, Any]:
    """Plain data for the result file."""
    return {
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "summary": [dataclasses.asdict(summary) for summary in summarise(cells)],
        "not_run": not_run(cells, samples),
    }


def not_run_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What is missing, one line for each setting and number of samples."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["setting"], cell["samples"]), []).append(cell)
    return [
        f"not run: {setting}, {', '.join(cell['task'] for cell in group)}: {samples} of "
        f"{group[0]['wanted']} samples ({group[0]['why']})"
        for (setting, samples), group in groups.items()
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run; bad input is one line and a non-zero exit."""
    try:
        run(sys.argv[1:])
    except PenstockError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
