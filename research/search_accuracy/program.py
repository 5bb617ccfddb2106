"""`python -m research.search_accuracy`: verified search, best of N and single samples."""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from typing_extensions import override

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError
from penstock.evaluate.intervals import bootstrap_mean, paired_bootstrap, wilson
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same
from penstock.evaluate.sitting import Sitting, sit
from penstock.evaluate.tasks import GeneratedTasks
from penstock.evaluate.text_table import format_table
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from research.clusters.recording import model_name
from research.grid import Grid
from research.search_accuracy.searches import (
    BEST_LOGPROB,
    BEST_VERIFIED,
    GREEDY,
    LOGPROB_SEARCH,
    SINGLE,
    VERIFIED,
    Plan,
    answer_document,
    answer_greedily,
    searches_of,
    small_memory,
)

# Accuracy with its interval by method and number of beams -----------------------------------------

METHODS = (VERIFIED, BEST_VERIFIED, LOGPROB_SEARCH, BEST_LOGPROB)
"""Those with a number of beams."""
PAIRS = ((VERIFIED, BEST_VERIFIED), (VERIFIED, LOGPROB_SEARCH), (VERIFIED, BEST_LOGPROB))
GREEDY_TEMPERATURE = 0.0


def summarise(records: Sequence[dict[str, Any]], beams: Sequence[int]) -> dict[str, Any]:
    """Rows, references and differences of all documents that are done, by temperature.

    Returns:
        `rows`: for a temperature, method and number of beams the share of documents whose path is
        right from end to end (`accuracy`, with its 95 % interval `low` to `high`, Wilson's) and
        the mean number of `hops` before the first mistake. `references`: greedy, the same way; and
        single samples, all of every document's, their interval from documents drawn anew.
        `differences`: of two methods on the same documents, from the paired bootstrap.
        `small_memory`: the searches that were run twice, taken together; None without any.
    """
    temperatures = sorted({one["temperature"] for one in records} - {GREEDY_TEMPERATURE})
    rows, references, differences = [], [], []
    greedy = [one for one in records if one["temperature"] == GREEDY_TEMPERATURE]
    if greedy:
        references.append({"temperature": GREEDY_TEMPERATURE, **_row(greedy, GREEDY, 0)})
    for temperature in temperatures:
        mine = [one for one in records if one["temperature"] == temperature]
        references.append({"temperature": temperature, **_single(mine)})
        for at, count in enumerate(beams):
            for method in METHODS:
                row = {"temperature": temperature, "beams": count, **_row(mine, method, at)}
                rows.append(row)
            for first, second in PAIRS:
                difference = paired_bootstrap((_right(mine, first, at), _right(mine, second, at)))
                differences.append({
                    "temperature": temperature, "beams": count, "first": first, "second": second,
                    **asdict(difference),
                })  # fmt: skip
    return {
        "rows": rows, "references": references, "differences": differences,
        "small_memory": _small_memory(records),
    }  # fmt: skip


def _row(records: Sequence[dict[str, Any]], method: str, at: int) -> dict[str, Any]:
    right = sum(_right(records, method, at))
    estimate = wilson(right, len(records))
    hops = [one["methods"][method]["hops"][at] for one in records]
    return {
        "method": method, "right": right, "documents": len(records), "accuracy": estimate.value,
        "low": estimate.low, "high": estimate.high, "hops": sum(hops) / len(hops),
    }  # fmt: skip


def _single(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All samples of all documents; samples of one document are not independent."""
    rights = [one["methods"][SINGLE]["right"] for one in records]
    hops = [count for one in records for count in one["methods"][SINGLE]["hops"]]
    estimate = bootstrap_mean([sum(one) / len(one) for one in rights])
    return {
        "method": SINGLE, "right": sum(map(sum, rights)), "documents": len(records),
        "samples": sum(map(len, rights)), "accuracy": estimate.value, "low": estimate.low,
        "high": estimate.high, "hops": sum(hops) / len(hops),
    }  # fmt: skip


def _right(records: Sequence[dict[str, Any]], method: str, at: int) -> list[int]:
    return [int(one["methods"][method]["right"][at]) for one in records]


def _small_memory(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    again = [one["small_memory"] for one in records if "small_memory" in one]
    if not again:
        return None
    return {
        "searches": len(again),
        **{name: sum(one[name] for one in again) for name in ("same_answer", "same_tree", "right")},
        **{
            name: max(one[name] for one in again)
            for name in ("limit_bytes", "full_bytes", "most_groups", "beams")
        },
        **{
            name: sum(one[name] for one in again) / len(again)
            for name in ("loaded_bytes", "written_bytes")
        },
        "store": again[0]["store"],
    }


# Accuracy by method and number of beams, and the small memory -------------------------------------

METHOD_NAMES = {
    VERIFIED: "step-wise search, verifier",
    BEST_VERIFIED: "best of N, verifier",
    LOGPROB_SEARCH: "step-wise search, log-probability",
    BEST_LOGPROB: "best of N, log-probability",
    SINGLE: "a single sample",
    GREEDY: "greedy",
}


def accuracy_tables(figures: dict[str, Any]) -> str:
    """A table for each temperature, the references, and what the small memory changed."""
    parts = []
    for temperature in sorted({row["temperature"] for row in figures["rows"]}):
        rows = [row for row in figures["rows"] if row["temperature"] == temperature]
        count = max(row["documents"] for row in rows)
        parts.append(
            f"whole paths of {figures['hops']} hops right, % (95 % interval): temperature "
            f"{temperature:g}, {count} documents\n\n{_table(rows)}"
        )
    parts += [_reference(row) for row in figures["references"]]
    if figures["small_memory"]:
        parts.append(_small_lines(figures["small_memory"]))
    return "\n\n".join(parts) if parts else "nothing was answered"


def per_cent(row: dict[str, Any]) -> str:
    """Accuracy and its interval, e.g. "85 (71-93)"."""
    accuracy, low, high = (100 * row[name] for name in ("accuracy", "low", "high"))
    return f"{accuracy:.0f} ({low:.0f}-{high:.0f})"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    beams = sorted({row["beams"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells = {(row["method"], row["beams"]): per_cent(row) for row in rows}
    return format_table(
        ["beams, or N", *map(str, beams)],
        [[METHOD_NAMES[method], *(cells[method, count] for count in beams)] for method in methods],
    )


def _reference(row: dict[str, Any]) -> str:
    at = f" at temperature {row['temperature']:g}" if row["method"] == SINGLE else ""
    samples = f", {row['samples']} samples" if "samples" in row else ""
    return (
        f"{METHOD_NAMES[row['method']]}{at}: {per_cent(row)} % right, {row['hops']:.1f} hops "
        f"before the first mistake ({row['documents']} documents{samples})"
    )


def _small_lines(found: dict[str, Any]) -> str:
    searches = found["searches"]
    return (
        f"{searches} verified searches of {found['beams']} beams again in "
        f"{format_bytes(found['limit_bytes'])} ({format_bytes(found['full_bytes'])} for all beams, "
        f"{found['store']}): {found['same_answer']} of {searches} answers and {found['same_tree']} "
        f"of {searches} trees the same; up to {found['most_groups']} groups, "
        f"{format_bytes(found['loaded_bytes'])} loaded and "
        f"{format_bytes(found['written_bytes'])} written per search"
    )


# Verified search, best of N and single samples ----------------------------------------------------

KIND = "search_accuracy"
TASK = "pointer_chasing"
Job = tuple[float, int]
"""Temperature, and number of the document."""
_MAY_GROW = ("documents", "checked")
_PRIVATE = ("out", "resume", "json", "store", "seed", "minutes")
_PASS_WORK = 16
"""What a token costs whatever the number of beams, in beams: for the time left, not to be exact."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `beams` and `temperatures` become tuples of numbers, ascending."""
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
    args = read_options(parser, arguments)
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


class _Documents(Grid[Job]):
    """All documents at all temperatures: what is to be done, and what is done."""

    ROWS = "documents"
    KEY = ("temperature", "document")

    def __init__(self, args: argparse.Namespace, loaded: LoadedModel) -> None:
        if loaded.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer")
        source = GeneratedTasks(loaded.tokenizer)
        if TASK not in source.names:
            raise ConfigError(f"{TASK} needs a model with the bundled model's vocabulary")
        self._args, self._loaded = args, loaded
        temperatures = (GREEDY_TEMPERATURE, *args.temperatures)
        jobs = [(one, number) for number in range(args.documents) for one in temperatures]
        super().__init__(settings_of(args) | {"weights": fingerprint(loaded.model)}, jobs)
        self.samples = source.draw(TASK, 0, args.documents, tokens=args.tokens, seed=args.seed)
        self.plan = Plan(
            beams=args.beams, width=args.width, step_tokens=args.step,
            small=small_memory(args.memory, args.store), small_beams=args.checked_beams,
        )  # fmt: skip
        for beams in self.plan.beams:
            if beams > 1:  # refuses what cannot be shared out before anything runs
                self.plan.params(beams, args.temperatures[0], self.samples[0], 0)

    @override
    def take_up(self, former: Result) -> None:
        names = [name for name in self.settings if name not in _MAY_GROW]
        check_same(former.settings, self.settings, names)
        super().take_up(former)
        last = max((one["document"] for one in self.rows), default=0)
        if last >= self._args.documents:
            raise ConfigError(f"cannot resume: the result has {last + 1} documents; ask for those")

    @override
    def title(self, job: Job) -> str:
        return f"document {job[1] + 1}"

    @override
    def measure(self, job: Job, progress: Progress) -> list[dict[str, Any]]:
        return [self._answer(*job, progress)]

    @override
    def work(self, job: Job) -> int:
        temperature, number = job
        if temperature == GREEDY_TEMPERATURE:
            return _PASS_WORK + 1
        checked = number < self._args.checked
        return sum(_PASS_WORK + beams for beams in searches_of(self.plan, checked=checked))

    @override
    def figures(self) -> dict[str, Any]:
        [hops] = {sample.answer.count(">") for sample in self.samples}
        return {
            "hops": hops, "answer_tokens": self.samples[0].max_new_tokens,
            "prompt_tokens": max(1 + len(sample.prompt.split()) for sample in self.samples),
            "beams": list(self._args.beams), "documents": self.rows,
            **summarise(self.rows, self._args.beams),
        }  # fmt: skip

    @override
    def report(self) -> str:
        return accuracy_tables(self.figures())

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


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result as it grows."""
    args = parse_arguments(arguments)
    result = Result.begin(
        KIND, arguments, settings_of(args), seed=args.seed, store=args.store, package="research"
    )
    sitting = Sitting(result, args)
    work = _Documents(args, load(args.model, dtype=args.dtype))
    result.settings = work.settings
    return sit(sitting, work, args)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings as they stand in the result."""
    settings = {name: value for name, value in vars(args).items() if name not in _PRIVATE}
    lists = {name: list(getattr(args, name)) for name in ("beams", "temperatures")}
    return settings | lists | {"model": model_name(args.model), "task": TASK}


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
