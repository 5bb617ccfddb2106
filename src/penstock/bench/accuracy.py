"""`python -m penstock.bench.accuracy`: what a memory budget costs in exact answers."""

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.bench.accuracy_cells import (
    Cell,
    accuracy_table,
    not_run,
    summarise,
)
from penstock.bench.accuracy_settings import Setting, parse_settings
from penstock.bench.answers import SharedPrefill, answer, ask
from penstock.bench.result import Result
from penstock.bench.tasks import TASKS, Sample, Words, make_sample
from penstock.core.errors import BudgetError, ConfigError, PenstockError
from penstock.models.loader import LoadedModel, load


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.accuracy", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, or a folder with its vocabulary")
    add("--tasks", default="all", help=f"of {', '.join(TASKS)}")
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
    add("--out", help="file for the result (benchmarks/results/NAME.json)")
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    if min(args.samples, args.batch, args.chunk) < 1:
        raise ConfigError("--samples, --batch and --chunk must be at least 1")
    return args


def draw_samples(
    task: str, first: int, count: int, *, tokens: int, words: Words, seed: int
) -> list[Sample]:
    """Samples `first`, `first + 1`, ... of a task; the same for the same seed, whatever else."""
    return [
        make_sample(task, tokens, random.Random(f"{seed}/{task}/{tokens}/{number}"), words)
        for number in range(first, first + count)
    ]


class Benchmark:
    """All cells of one run; a batch of every task in turn, so that a time limit is fair."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model and read the settings.

        Raises:
            ConfigError: a task or a setting does not exist.
            ModelLoadError: the model cannot be loaded.
        """
        self._args = args
        tasks = list(TASKS) if args.tasks == "all" else args.tasks.split(",")
        for task in tasks:
            if task not in TASKS:
                raise ConfigError(f"no task is called {task!r}; there are {', '.join(TASKS)}")
        self._tasks = tasks
        self.settings = parse_settings(args.settings or ["full,kvswap@1/13,kvswap@1/34"])
        self._loaded: LoadedModel = load(args.model, dtype=args.dtype, device=args.device)
        if self._loaded.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer")
        self._words = Words.of(self._loaded.tokenizer)
        self.cells = [Cell(task=t, setting=s.text) for s in self.settings for t in tasks]

    def run(self) -> None:
        """Answer everything, or as much as the time allows."""
        args, began = self._args, time.perf_counter()
        for first in range(0, args.samples, args.batch):
            count = min(args.batch, args.samples - first)
            for task in self._tasks:
                spent = (time.perf_counter() - began) / 60
                if args.minutes is not None and spent > args.minutes:
                    _say(f"time is up after {spent:.1f} minutes")
                    return
                _say(f"{spent:6.1f} min  {task}: samples {first + 1} to {first + count}")
                self._answer(task, first, count)

    def _answer(self, task: str, first: int, count: int) -> None:
        args = self._args
        samples = draw_samples(
            task, first, count, tokens=args.tokens, words=self._words, seed=args.seed
        )
        question = ask(self._loaded, samples)
        shared = None
        if not args.own_prefill:
            shared = SharedPrefill(self._loaded.model, question, args.chunk)
        for setting in self.settings:
            cell = self._cell(task, setting)
            if cell.refused is not None:
                continue
            try:
                answers = answer(
                    self._loaded, question, setting, chunk=args.chunk, shared=shared,
                    store=args.store,
                )  # fmt: skip
            except BudgetError as error:
                cell.refused = str(error)
            else:
                cell.add(question, answers)

    def _cell(self, task: str, setting: Setting) -> Cell:
        return next(c for c in self.cells if c.task == task and c.setting == setting.text)


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it.

    Raises:
        PenstockError: bad input, or no room for the caches.
    """
    args = parse_arguments(arguments)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "store", "json", "model")}
    result = Result.begin("accuracy", arguments, settings, seed=args.seed, store=args.store)
    benchmark = Benchmark(args)
    result.settings["settings"] = [setting.text for setting in benchmark.settings]
    began = time.perf_counter()
    interrupted = False
    try:
        benchmark.run()
    except KeyboardInterrupt:
        interrupted = True
    result.figures = figures_of(benchmark.cells, args.samples)
    result.figures["minutes"] = (time.perf_counter() - began) / 60
    result.figures["shared_prefill"] = not args.own_prefill
    print(accuracy_table(benchmark.cells))
    print(
        "\nloss: points lost to full attention, the mean over tasks, +- its standard error (the "
        "samples are\nthe same for every setting). memory: fast memory of one batch's cache."
    )
    for line in not_run_lines(result.figures["not_run"]):
        print(line)
    if args.out:
        result.save(args.out)
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
