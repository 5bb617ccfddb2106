"""`penstock bench needles`: a needle at every depth of documents of every length."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate.accuracy_settings import Setting, parse_settings
from penstock.evaluate.answers import SharedPrefill, answer, ask
from penstock.evaluate.entry import run_program
from penstock.evaluate.needle_cells import (
    NeedleCell,
    needle_tables,
    needles_not_run,
    summarise_needles,
)
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same, digest_of
from penstock.evaluate.sitting import Sitting, sit
from penstock.evaluate.tasks import GeneratedTasks, Sample, even_depths, grid, judge
from penstock.generation.prompts import read_text_file
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load

_TASKS = ("single_essay", "single_2")
"""A needle in random text: the recall task, and its English counterpart."""
_SAME_WHEN_RESUMED = (
    "task", "model", "device", "dtype", "weights", "texts", "batch", "chunk", "chat",
)  # fmt: skip

_PREFILL_WORK = 10
"""Reading a prompt, in answers by one setting: for the time left, not to be exact."""

Place = tuple[int, float]
"""Number of a sample, and the depth of its needle."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="penstock bench needles", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, or a folder")
    add("--task", help="one that asks for a single needle (default: single_essay or single_2)")
    add(
        "--haystack", action="append", default=[], metavar="FILE",
        help="UTF-8 text that English needles are hidden in, instead of made-up prose; repeatable",
    )  # fmt: skip
    add("--chat", action="store_true", help="ask through the tokenizer's chat template")
    add("--lengths", default="2048,4096,8192,16384", help="tokens of the prompts")
    add("--depths", type=int, default=6, help="places of the needle, from the start to the end")
    add("--samples", type=int, default=4, help="of each length and depth")
    add(
        "--settings", action="append",
        help="POLICY@BUDGET:option=value,... separated by commas",
    )  # fmt: skip
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", help="of weights and cache (default: as stored)")
    add("--batch", type=int, help="prompts answered at a time (default 2, on CUDA 24)")
    add("--chunk", type=int, default=2048, help="tokens per forward pass of the prompt")
    add("--disk", dest="store", default="auto", help="directory of the caches, or memory")
    args = read_options(
        parser, arguments,
        renamed={"--store": "--disk"},
    )  # fmt: skip
    if args.batch is None:
        args.batch = 2 if args.device == "cpu" else 24
    if min(args.samples, args.batch, args.chunk) < 1:
        raise ConfigError("--samples, --batch and --chunk must be at least 1")
    return args


class NeedleGrid:
    """All cells of one run, and who answers them.

    Attributes:
        cells: setting by setting, length by length, depth by depth.
        settings: the ways of answering.
        task: the task's name.
        weights: the model's fingerprint: folders of one name may hold different ones.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model and read the settings.

        Raises:
            ConfigError: a length, depth, setting or task that cannot be.
            ModelLoadError: the model cannot be loaded.
        """
        self._args = args
        self.settings = parse_settings(
            args.settings or ["full,kvswap@1/13,kvswap@1/34,streaming_llm@1/13"]
        )
        self._depths = even_depths(args.depths)
        self._lengths = whole_numbers(args.lengths, "--lengths")
        points = grid(self._lengths, self._depths)
        self._loaded: LoadedModel = load(args.model, dtype=args.dtype, device=args.device)
        if self._loaded.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer")
        self.weights = fingerprint(self._loaded.model)
        self._source = GeneratedTasks(
            self._loaded.tokenizer, chat=args.chat,
            texts=[read_text_file(path, "haystack") for path in args.haystack],
        )  # fmt: skip
        known = self._source.depth_names
        self.task: str = args.task or next(task for task in _TASKS if task in known)
        if self.task not in known:
            raise ConfigError(
                f"{self.task!r} is no task with one needle; there are {', '.join(sorted(known))}"
            )
        self.cells = [
            NeedleCell(tokens=point.tokens, depth=point.depth, setting=setting.text)
            for setting in self.settings
            for point in points
        ]

    def settings_of(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The command line's settings, with what they came to."""
        self._settings = settings | {
            "task": self.task, "settings": [setting.text for setting in self.settings],
            "weights": self.weights, "texts": digest_of(self._args.haystack),
        }  # fmt: skip
        return self._settings

    def take_up(self, former: Result) -> None:
        """Go on with what an interrupted run has answered; the grid may have grown.

        Raises:
            ConfigError: that run asked for something else, or for cells that would be lost.
        """
        check_same(former.settings, self._settings, _SAME_WHEN_RESUMED)
        done = {_key(cell): cell for cell in (NeedleCell(**c) for c in former.figures["cells"])}
        lost = [cell for cell in done.values() if cell.scores]
        here = {_key(cell) for cell in self.cells}
        lost = [cell for cell in lost if _key(cell) not in here]
        if lost:
            raise ConfigError(
                f"cannot resume: the result has {lost[0].setting} at {lost[0].tokens} tokens and "
                f"depth {lost[0].depth:g}, which this command leaves out"
            )
        self.cells = [done.get(_key(cell), cell) for cell in self.cells]

    def figures(self) -> dict[str, Any]:
        """Cells, their summary, and what was not run."""
        return {
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
            "summary": summarise_needles(self.cells),
            "not_run": needles_not_run(self.cells, self._args.samples),
        }  # fmt: skip

    def report(self) -> str:
        """A table for each setting, and what was not run."""
        lines = [
            f"needles found, %: {self.task}, {self._args.samples} samples a cell\n",
            needle_tables(self.cells),
        ]
        lines += [
            f"not run: {row['setting']}, {row['tokens']:,} tokens: {row['samples']} of "
            f"{row['wanted']} samples ({row['why']})"
            for row in needles_not_run(self.cells, self._args.samples)
        ]
        return "\n".join(lines)

    def run(self, sitting: Sitting) -> None:
        """Answer everything, or as much as the time allows.

        All lengths take turns, so that a time limit cuts them alike; a batch has the same sample
        with its needle at several depths, and is saved when it is answered.
        """
        batches = [
            (tokens, places)
            for round_ in self._rounds()
            for tokens in self._lengths
            for places in round_
        ]
        each = _PREFILL_WORK + len(self.settings)
        progress = Progress(each * sum(_work(tokens, places) for tokens, places in batches))
        for tokens, places in batches:
            if sitting.time_is_up():
                return
            self._answer(tokens, places, progress)
            sitting.keep(self.figures())

    def _rounds(self) -> list[list[list[Place]]]:
        """Batches of places; a round has all depths of as many samples as one batch takes."""
        args = self._args
        together = max(1, args.batch // len(self._depths))
        rounds = []
        for first in range(0, args.samples, together):
            numbers = range(first, min(first + together, args.samples))
            places = [(number, depth) for number in numbers for depth in self._depths]
            rounds.append([places[i : i + args.batch] for i in range(0, len(places), args.batch)])
        return rounds

    def _answer(self, tokens: int, places: Sequence[Place], progress: Progress) -> None:
        args, work = self._args, _work(tokens, places)
        missing = {
            setting.text: [place for place in places if self._misses(setting, tokens, place)]
            for setting in self.settings
        }
        asked = [place for place in places if any(place in left for left in missing.values())]
        left = [setting for setting in self.settings if missing[setting.text]]
        progress.skip(work * (len(self.settings) - len(left)))
        if not left:
            progress.skip(_PREFILL_WORK * work)
            return
        title = f"{tokens:,} tokens, {_span(asked)}"
        question = ask(self._loaded, [self._draw(tokens, place) for place in asked])
        progress.say(f"{title}: reading the prompts")
        shared = SharedPrefill(self._loaded.model, question, args.chunk)
        progress.step(_PREFILL_WORK * work)
        for setting in left:
            progress.say(f"{title}: {setting.text}")
            try:
                answers = answer(
                    self._loaded, question, setting, chunk=args.chunk, shared=shared,
                    store=args.store,
                )  # fmt: skip
            except BudgetError as error:
                for _, depth in missing[setting.text]:
                    self._cell(tokens, depth, setting).refused = str(error)
                progress.skip(work)
            else:
                for place, sample, text in zip(asked, question.samples, answers.texts, strict=True):
                    if place in missing[setting.text]:
                        cell = self._cell(tokens, place[1], setting)
                        cell.add(judge(sample, text), answers)
                progress.step(work)

    def _draw(self, tokens: int, place: Place) -> Sample:
        number, depth = place
        [sample] = self._source.draw(
            self.task, number, 1, tokens=tokens, seed=self._args.seed, depth=depth
        )
        return sample

    def _misses(self, setting: Setting, tokens: int, place: Place) -> bool:
        number, depth = place
        cell = self._cell(tokens, depth, setting)
        return cell.refused is None and len(cell.scores) <= number

    def _cell(self, tokens: int, depth: float, setting: Setting) -> NeedleCell:
        wanted = (tokens, depth, setting.text)
        return next(cell for cell in self.cells if _key(cell) == wanted)


def run(arguments: Sequence[str]) -> Result:
    """Measure the grid, print a table for each setting and save the result as it grows."""
    args = parse_arguments(arguments)
    private = ("out", "store", "json", "haystack", "resume")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings |= {"model": Path(args.model).name, "haystack": len(args.haystack)}
    result = Result.begin("needles", arguments, settings, seed=args.seed, store=args.store)
    sitting, measured = Sitting(result, args), NeedleGrid(args)
    result.settings = measured.settings_of(settings)
    return sit(sitting, measured, args)


def _key(cell: NeedleCell) -> tuple[int, float, str]:
    return cell.tokens, cell.depth, cell.setting


def _work(tokens: int, places: Sequence[Place]) -> int:
    """What a batch costs: attention over long prompts is most of it, and has no unit."""
    return len(places) * tokens * tokens


def _span(places: Sequence[Place]) -> str:
    numbers = [number + 1 for number, _ in places]
    depths = [depth for _, depth in places]
    which = f"{min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else f"{numbers[0]}"
    deep = f"{100 * min(depths):.0f} to " if len(set(depths)) > 1 else ""
    return f"sample {which}, {deep}{100 * max(depths):.0f} % deep"


if __name__ == "__main__":
    run_program(run)
