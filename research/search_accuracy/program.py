"""`python -m research.search_accuracy`: verified search, best of N and single samples."""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, result_file
from penstock.evaluate.resuming import check_same
from penstock.evaluate.sitting import Sitting, closed, say
from penstock.evaluate.tasks import GeneratedTasks, Sample
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from research.clusters.program import model_name
from research.search_accuracy.searches import (
    Plan,
    answer_document,
    answer_greedily,
    searches_of,
    small_memory,
)
from research.search_accuracy.summary import GREEDY_TEMPERATURE, summarise
from research.search_accuracy.table import accuracy_tables

KIND = "search_accuracy"
TASK = "pointer_chasing"
_MAY_GROW = ("documents", "checked")
_PRIVATE = ("out", "resume", "json", "store", "seed", "minutes")
_PASS_WORK = 16
"""What a token costs whatever the number of beams, in beams: for the time left, not to be exact."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `beams` and `temperatures` become tuples of numbers, ascending.

    Raises:
        ConfigError: an option that makes no sense.
    """
    parser = argparse.ArgumentParser(prog="python -m research.search_accuracy", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--dtype", default="float32", help="of weights and cache; below float32, which beams run"
        " together changes tokens, as any rounding does")  # fmt: skip
    add("--tokens", type=int, default=512, help="of the documents; the path grows with them")
    add("--documents", type=int, default=40, help="how many, each answered in every way")
    add("--temperatures", default="1.6,2.0", help="at which single samples fail, more or less")
    add("--beams", default="1,2,4,8,16,32", help="candidates of a step, and samples of best of N")
    add("--width", type=int, default=2, help="continuations of each surviving beam")
    add("--step", type=int, default=12, help="tokens of a step; a hop has 3")
    add("--checked", type=int, default=4, help="documents whose verified search is run again in"
        " small memory, which must change nothing")  # fmt: skip
    add("--checked-beams", type=int, default=16, help="candidates of that search")
    add("--memory", default="1/13", help="the small memory: bytes, 6MiB, or a fraction of what"
        " all beams take")  # fmt: skip
    add("--store", default="auto", help="slow tier of the small memory: a folder, or memory")
    add("--minutes", type=float, help="stop cleanly when this much time has passed")
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
    args.beams = _ascending(args.beams, "--beams", int)
    args.temperatures = _ascending(args.temperatures, "--temperatures", float)
    if min(args.documents, *args.beams, args.width, args.step) < 1 or args.checked < 0:
        raise ConfigError("--documents, --beams, --width and --step must be at least 1")
    if args.temperatures[0] <= 0:
        raise ConfigError("--temperatures must be above 0; greedy is always run")
    if args.checked and args.checked_beams not in args.beams[args.beams[0] == 1 :]:
        raise ConfigError(
            f"--checked-beams {args.checked_beams} is none of the searches of --beams; name one "
            "of them, or --checked 0"
        )
    return args


class _Work:
    """All documents at all temperatures: what is to be done, and what is done."""

    def __init__(self, args: argparse.Namespace, loaded: LoadedModel) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer")
        source = GeneratedTasks(loaded.tokenizer)
        if TASK not in source.names:
            raise ConfigError(f"{TASK} needs a model with the bundled model's vocabulary")
        self._args, self._loaded = args, loaded
        self.settings = settings_of(args) | {"weights": fingerprint(loaded.model)}
        self.samples = source.draw(TASK, 0, args.documents, tokens=args.tokens, seed=args.seed)
        self.plan = Plan(
            beams=args.beams, width=args.width, step_tokens=args.step,
            small=small_memory(args.memory, args.store), small_beams=args.checked_beams,
        )  # fmt: skip
        for beams in self.plan.beams:
            if beams > 1:  # refuses what cannot be shared out before anything runs
                self.plan.params(beams, args.temperatures[0], self.samples[0], 0)
        self.records: list[dict[str, Any]] = []

    def take_up(self, former: Result) -> None:
        """Go on with the records of an earlier run.

        Raises:
            ConfigError: it was made with other settings.
        """
        names = [name for name in self.settings if name not in _MAY_GROW]
        check_same(former.settings, self.settings, names)
        self.records = list(former.figures["documents"])
        last = max((one["document"] for one in self.records), default=0)
        if last >= self._args.documents:
            raise ConfigError(f"cannot resume: the result has {last + 1} documents; ask for those")

    def run(self, keep: Callable[[], None]) -> None:
        """Answer document by document, all temperatures in turn, or what the time allows."""
        args, began = self._args, time.perf_counter()
        left = [key for key in self._keys() if not self._done(*key)]
        progress = Progress(sum(self._cost(*key) for key in left))
        for temperature, number in left:
            spent = (time.perf_counter() - began) / 60
            if args.minutes is not None and spent > args.minutes:
                say(f"time is up after {spent:.1f} minutes; --resume goes on")
                return
            self.records.append(self._answer(temperature, number, progress))
            keep()

    def _answer(self, temperature: float, number: int, progress: Progress) -> dict[str, Any]:
        sample, key = self.samples[number], {"temperature": temperature, "document": number}
        title = f"document {number + 1}"
        if temperature == GREEDY_TEMPERATURE:
            record = answer_greedily(self._loaded, sample)
            progress.step(_PASS_WORK + 1)
            progress.say(f"{title}: greedy")
            return key | record

        def report(what: str, beams: int) -> None:
            progress.step(_PASS_WORK + beams)
            progress.say(f"{title} at temperature {temperature:g}: {what}, {beams} beams")

        return key | answer_document(
            self._loaded, sample, self.plan, temperature=temperature, report=report,
            seed=random.Random(f"{self._args.seed}/{number}").getrandbits(32),
            checked=number < self._args.checked,
        )  # fmt: skip

    def _keys(self) -> Iterator[tuple[float, int]]:
        for number in range(self._args.documents):
            for temperature in (GREEDY_TEMPERATURE, *self._args.temperatures):
                yield temperature, number

    def _done(self, temperature: float, number: int) -> bool:
        return any(
            (one["temperature"], one["document"]) == (temperature, number) for one in self.records
        )

    def _cost(self, temperature: float, number: int) -> int:
        if temperature == GREEDY_TEMPERATURE:
            return _PASS_WORK + 1
        checked = number < self._args.checked
        return sum(_PASS_WORK + beams for beams in searches_of(self.plan, checked=checked))


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result as it grows.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    result = Result.begin(
        KIND, arguments, settings_of(args), seed=args.seed, store=args.store, package="research"
    )
    sitting = Sitting(result, args)
    work = _Work(args, load(args.model, dtype=args.dtype))
    result.settings = work.settings
    if sitting.former is not None:
        work.take_up(sitting.former)
    facts = _facts(work.samples)

    def keep() -> None:
        sitting.keep({
            **facts, "beams": list(args.beams), "documents": work.records,
            **summarise(work.records, args.beams),
        })  # fmt: skip

    interrupted = False
    try:
        work.run(keep)
    except KeyboardInterrupt:
        interrupted = True
    keep()
    print(accuracy_tables(result.figures))
    if interrupted:
        raise KeyboardInterrupt
    return closed(result, args)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings as they stand in the result."""
    settings = {name: value for name, value in vars(args).items() if name not in _PRIVATE}
    lists = {name: list(getattr(args, name)) for name in ("beams", "temperatures")}
    return settings | lists | {"model": model_name(args.model), "task": TASK}


def _facts(samples: Sequence[Sample]) -> dict[str, Any]:
    """What the documents are like; all are alike."""
    [hops] = {sample.answer.count(">") for sample in samples}
    return {
        "hops": hops, "answer_tokens": samples[0].max_new_tokens,
        "prompt_tokens": max(1 + len(sample.prompt.split()) for sample in samples),
    }  # fmt: skip


def _ascending(text: str, option: str, number: Callable[[str], Any]) -> tuple[Any, ...]:
    """Different numbers separated by commas, in their order.

    Raises:
        ConfigError: something else.
    """
    try:
        found = tuple(number(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers such as 1,2,4, not {text!r}") from error
    if any(one >= other for one, other in pairwise(found)):
        raise ConfigError(f"{option} takes ascending numbers, not {text}")
    return found
