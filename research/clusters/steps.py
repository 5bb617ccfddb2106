"""Decode steps of methods that take turns over one forced text: rows, reads, the grid of them."""

import argparse
import dataclasses
import sys
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import override

from penstock.core.errors import ConfigError, PenstockError
from penstock.devices.measure import fit_profile
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.answers import Question, SharedPrefill
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.resuming import Row
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.generation.prompts import make_batch
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel, load
from penstock.models.plain_model import share_weights
from penstock.storage.file import Int64Array, Ticket
from penstock.storage.measured_directory import measure_directory
from research.clusters.recording import RING_WALK, answer_of, digest_of_text, model_name, read_on
from research.grid import Grid

# Every read that a cache's files are asked for, and how long the files were busy ------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What went to the files of a cache, splits and partly filled sectors included."""

    reads: int = 0
    read_bytes: int = 0
    """Padding and whole clusters included."""
    busy_s: float = 0.0
    """Time in which at least one batch was under way, from submission to the end of the wait."""

    def __add__(self, other: "Reads") -> "Reads":
        return Reads(
            reads=self.reads + other.reads, read_bytes=self.read_bytes + other.read_bytes,
            busy_s=self.busy_s + other.busy_s,
        )  # fmt: skip


class ReadWatch:
    """Counts reads at the files themselves, so that those of all methods count alike.

    Fetches come in one round or several; loads for splits are submitted on the writer's thread.
    """

    def __init__(self, cache: TieredCache) -> None:
        """Start watching; a cache that keeps everything in memory has nothing to watch."""
        self._tickets: list[Ticket] = []
        store = cache.tiers._store
        for region in [] if store is None else store._regions:
            self._watch(region.file)

    def _watch(self, file: Any) -> None:
        submit = file.submit_reads

        def submit_reads(
            offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
        ) -> Ticket:
            ticket: Ticket = submit(offsets, lengths, addresses, keep_alive)
            self._tickets.append(ticket)
            return ticket

        file.submit_reads = submit_reads

    def take(self) -> Reads:
        """What has ended since the last call; what is under way is told by the next one."""
        tickets, self._tickets = self._tickets, []
        ended = [ticket for ticket in tickets if ticket.finished_ns]
        self._tickets += [ticket for ticket in tickets if not ticket.finished_ns]
        return Reads(
            reads=sum(ticket.num_reads for ticket in ended),
            read_bytes=sum(ticket.read_bytes for ticket in ended),
            busy_s=covered_ns([(one.submitted_ns, one.finished_ns) for one in ended]) / 1e9,
        )


def covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    """The length of a union of spans (start, end)."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


# Methods that decode the same forced tokens, in turn ----------------------------------------------

MAIN, CACHE = "main", "cache"
"""Sections: methods beside each other; DynaKV with caches of several sizes."""
DISK = "auto"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: a method at a length and a selection, on a device."""

    section: str
    device: str
    """The store: "auto" for the real disk, or a simulated device over memory."""
    length: int
    """Tokens of prompt and output together."""
    ratio: float
    """Share of them that a step selects."""
    method: str
    """As `penstock bench accuracy` writes settings; what it selects comes from the ratio."""
    reuse: float = 1.0
    """Tokens in slots, in selections; 0: two pools serve all layers and nothing is reused."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows apart."""
        return (*self.group, self.method, self.reuse)

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows that are measured in turn have this in common."""
        return self.section, self.device, self.length, self.ratio

    @property
    def selected(self) -> int:
        """Tokens that a step selects."""
        return max(1, round(self.ratio * self.length))

    @property
    def policy(self) -> SelectionPolicy:
        """The policy, with as many selected tokens as all others."""
        policy: Any = parse_setting(self.method).policy
        if "selected_tokens" not in {field.name for field in dataclasses.fields(policy)}:
            return policy  # type: ignore[no-any-return]
        slots = round(self.reuse * self.selected)
        same: SelectionPolicy = replace(policy, selected_tokens=self.selected, reuse_tokens=slots)
        return same

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{self.device}, {self.length:,} tokens, {self.ratio:.0%}: {self.method}"

    @property
    def row(self) -> dict[str, Any]:
        """What a row of the result begins with."""
        return dataclasses.asdict(self)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a row's case."""
    return Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)}).key


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How many tokens a row decodes."""

    warm: int
    """Steps before the first round; the first of them clusters the prompt."""
    rounds: int
    """Rounds in which all methods take turns; one uncounted step begins each."""
    steps: int
    """Counted steps of a round."""

    @property
    def decoded(self) -> int:
        """Forced tokens, those that are not counted included."""
        return self.warm + self.rounds * (self.steps + 1)


class ForcedText:
    """A text whose last tokens are decoded; the rest is prefilled once, by the plain model."""

    def __init__(self, loaded: LoadedModel, ids: list[int], decoded: int, chunk: int) -> None:
        """Prefill all but the last `decoded` tokens.

        Args:
            chunk: tokens per forward pass.

        Raises:
            PromptError: the text does not fit the model's positions.
        """
        self.prompt_tokens, self.decoded = len(ids) - decoded, decoded
        self.ids = torch.tensor([ids])
        batch = make_batch(loaded, [ids[: self.prompt_tokens]], new_tokens=decoded, pad_token_id=0)
        question = Question(samples=[], batch=batch, new_tokens=decoded, pad_token_id=0)
        self.prefill = SharedPrefill(loaded.model, question, chunk)


class LiveRow:
    """A case with its cache filled, decoding the forced tokens."""

    def __init__(self, case: Case, text: ForcedText, loaded: LoadedModel, pace: Pace) -> None:
        """Fill the cache and decode the warm-up.

        Raises:
            BudgetError: the cache cannot be as small as its method says.
            StorageError: the disk is full or cannot be used.
        """
        self._text, self._at = text, text.prompt_tokens
        self._model: Any = share_weights(loaded.model)  # other rows' hooks stay away
        self.cache = TieredCache(
            self._model, case.policy, memory=parse_setting(case.method).memory, store=case.device,
            max_tokens=int(text.ids.shape[1]),
        )  # fmt: skip
        self._steps_s: list[list[float]] = []
        self._counters: dict[str, float] = {}
        self._reads = Reads()
        self._right = 0
        try:
            start = time.perf_counter()
            text.prefill.put_into(self.cache)
            self._forward(self.cache.get_seq_length(), text.prompt_tokens)
            self._fill_s = time.perf_counter() - start
            self._first_s = self._step()
            for _ in range(pace.warm - 1):
                self._step()
            self._watch = ReadWatch(self.cache)
        except BaseException:
            self.cache.close()
            raise

    def _forward(self, first: int, end: int) -> torch.Tensor:
        positions = torch.arange(first, end)[None]
        with torch.no_grad():
            out = self._model(
                self._text.ids[:, first:end], **cache_argument(self._model, self.cache),
                position_ids=positions, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _step(self) -> float:
        """Decode the next forced token; returns its seconds."""
        start = time.perf_counter()
        logits = self._forward(self._at, self._at + 1)
        seconds = time.perf_counter() - start
        self._at += 1
        if self._at < self._text.ids.shape[1]:
            self._right += int(logits.argmax()) == int(self._text.ids[0, self._at])
        return seconds

    def run_round(self, steps: int) -> None:
        """Decode one uncounted token, then the counted ones."""
        self._step()
        before = self.cache.stats.decode.as_dict()
        self._watch.take()
        self._steps_s.append([self._step() for _ in range(steps)])
        self._reads += self._watch.take()
        for name, value in self.cache.stats.decode.as_dict().items():
            self._counters[name] = self._counters.get(name, 0.0) + value - before[name]

    def figures(self) -> dict[str, Any]:
        """For JSON; times and bytes are of one step, on average."""
        steps_ms = 1e3 * np.array(self._steps_s).ravel()
        count, seconds = len(steps_ms), float(steps_ms.sum()) / 1e3
        counted, reads, plan = self._counters, self._reads, self.cache.plan
        missed = counted["units_wanted"] - counted["units_hit"]
        useful = missed * plan.unit_bytes
        busy = reads.busy_s or float("inf")
        report, store = self.cache.report(), self.cache.tiers._store
        return {
            "steps": count, "mean_ms": seconds / count * 1e3, "tokens_per_s": count / seconds,
            "median_ms": float(np.median(steps_ms)), "p90_ms": float(np.percentile(steps_ms, 90)),
            "round_ms": [float(np.mean(part)) * 1e3 for part in self._steps_s],
            "reads": reads.reads / count, "read_bytes": reads.read_bytes / count,
            "read_kib": reads.read_bytes / reads.reads / 1024 if reads.reads else None,
            "useful_bytes": useful / count, "read_ms": reads.busy_s / count * 1e3,
            "bandwidth": reads.read_bytes / busy, "effective_bandwidth": useful / busy,
            "stall_ms": counted["stall_s"] / count * 1e3,
            "stall_share": counted["stall_s"] / seconds,
            "select_ms": counted["predict_s"] / count * 1e3,
            "follow_ms": counted.get("follow_s", 0.0) / count * 1e3,
            "adapt_ms": counted.get("adapt_s", 0.0) / count * 1e3,
            "hit_rate": 1 - missed / counted["units_wanted"] if counted["units_wanted"] else None,
            "written_bytes": counted["written_bytes"] / count,
            "ledger_bytes": report.used_bytes, "ledger_items": report.items,
            "full_cache_bytes": report.full_cache_bytes,
            "selected_tokens": plan.selected_units, "slots": plan.num_slots,
            "shared_pools": plan.shared_pools, "fill_s": self._fill_s,
            "first_step_s": self._first_s, "prompt_tokens": self._text.prompt_tokens,
            "right": self._right / (self._text.decoded - 1),
            "is_direct": None if store is None else store.is_direct, "options": self._options(),
        }  # fmt: skip

    def _options(self) -> dict[str, Any]:
        found = vars(self.cache.policy)
        return {k: v for k, v in found.items() if isinstance(v, bool | int | float | str)}

    def close(self) -> None:
        """Give everything back."""
        self.cache.close()


def run_group(
    cases: Sequence[Case], makers: Sequence[Callable[[], LiveRow]], pace: Pace, say: Say,
    done: Callable[[int], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Decode all cases in turn, every second round backwards. One that fails says why in its row.

    Args:
        makers: each fills the cache of its case.
        say: told what is going on.
        done: told of each case that is filled, and again when the group is measured.
    """
    rows = [case.row for case in cases]
    live: list[tuple[LiveRow, dict[str, Any]]] = []
    try:
        for case, make, row in zip(cases, makers, rows, strict=True):
            say(case.title)
            try:
                live.append((make(), row))
            except Exception as error:  # the other rows are worth having
                _note(row, error)
            done(1)
        for number in range(pace.rounds):
            say(f"decoding, round {number + 1} of {pace.rounds}")
            for one, row in live if number % 2 == 0 else live[::-1]:
                if "error" not in row:
                    try:
                        one.run_round(pace.steps)
                    except Exception as error:
                        _note(row, error)
        for one, row in live:
            if "error" not in row:
                row.update(one.figures())
        done(len(cases))
    finally:
        for one, _ in live:
            one.close()
    return rows


def _note(row: dict[str, Any], error: Exception) -> None:
    """Say in a row why it has no figures; what is not our own refusal also with its place."""
    first = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, PenstockError):
        row["error"] = first
        row["refused"] = isinstance(error, ConfigError)  # and would be again
        return
    row["error"] = f"{type(error).__name__}: {first}"
    traceback.print_exception(error, file=sys.stderr)


# Groups of methods that decode one forced text in turn, and the options of that -------------------

AnyCase = TypeVar("AnyCase", bound=Case)
_PRIVATE = ("out", "json", "resume", "merge", "minutes", "prompt_file")


def add_step_options(
    parser: argparse.ArgumentParser, *, methods: Sequence[str], devices: str, steps: int, warm: int
) -> None:
    """Options of the text, of what decodes it, and of the turns.

    Args:
        methods, devices, steps, warm: what is measured if the command line names nothing else.
    """
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--prompt-file", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default=RING_WALK, help="whose document and right answer are the text")
    add("--devices", default=devices, help=f"{DISK}, or simulated: {', '.join(PRESETS)}")
    add("--methods", default=";".join(methods), help="as in penstock bench accuracy")
    add("--steps", type=int, default=steps, help="measured steps of a row")
    add("--rounds", type=int, default=4, help="rounds in which the rows take turns")
    add("--warm", type=int, default=warm, help="steps before the first round")
    add(
        "--threads", type=int, default=1,
        help="of the model's own arithmetic; clusters follow the output on a thread beside it",
    )  # fmt: skip
    add("--chunk", type=int, default=512, help="tokens per forward pass of the prefill")


def check_step_options(
    args: argparse.Namespace, devices: Iterable[str], shares: Iterable[float],
    lengths: Iterable[int],
) -> None:  # fmt: skip
    """Refuse what makes no sense.

    Args:
        devices, shares, lengths: all that the command line names.

    Raises:
        ConfigError: a number is out of its range, or a device does not exist.
    """
    for device in devices:
        if device != DISK and device not in PRESETS:
            raise ConfigError(f"no device {device!r}; choose from {DISK}, {', '.join(PRESETS)}")
    if min(args.rounds, args.warm, args.chunk, args.threads) < 1 or args.steps < args.rounds:
        raise ConfigError(
            "--rounds, --warm, --chunk and --threads count from 1 on, --steps from --rounds on"
        )
    if not all(0 < share < 1 for share in shares):
        raise ConfigError("shares of the tokens are above 0 and below 1")
    least = pace_of(args).decoded + 64
    if min(lengths, default=least) < least:
        raise ConfigError(f"lengths must be at least {least}: so much is decoded, and a prompt")


def pace_of(args: argparse.Namespace) -> Pace:
    """Warm-up, and the measured steps spread over the rounds."""
    return Pace(warm=args.warm, rounds=args.rounds, steps=args.steps // args.rounds)


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


class StepGrid(Grid[tuple[AnyCase, ...]]):
    """All rows of a run, group by group; those of one length follow on one another."""

    loaded: LoadedModel
    pace: Pace

    def __init__(
        self, args: argparse.Namespace, settings: dict[str, Any], cases: Sequence[AnyCase]
    ) -> None:
        """Read what is to be measured; nothing is loaded yet."""
        groups: dict[tuple[Any, ...], list[AnyCase]] = {}
        for case in cases:
            parse_setting(case.method)
            groups.setdefault(case.group, []).append(case)
        super().__init__(settings, [tuple(group) for group in groups.values()])
        self._args, self.pace = args, pace_of(args)
        self._disk: dict[str, float] | None = None
        self._text: tuple[int, ForcedText] | None = None

    @abstractmethod
    def measure_group(
        self, group: Sequence[AnyCase], text: ForcedText, progress: Progress,
        step: Callable[[int], None],
    ) -> list[Row]:  # fmt: skip
        """The rows of a group; `step` is told of cases, as `run_group` does."""

    @abstractmethod
    def summary(self) -> Row:
        """What follows from all rows."""

    @override
    def keys(self, job: tuple[AnyCase, ...]) -> list[tuple[Any, ...]]:
        return [case.key for case in job]

    @override
    def title(self, job: tuple[AnyCase, ...]) -> str:
        return job[0].title

    @override
    def work(self, job: tuple[AnyCase, ...]) -> int:
        return 2 * len(job) * (job[0].length // 1024 + 4)

    @override
    def take_up(self, former: Result) -> None:
        super().take_up(former)
        self._disk = former.figures.get("disk")

    @override
    def open(self) -> None:
        if self._disk is None and any(case.device == DISK for job in self.jobs for case in job):
            self._disk = _measured_disk()
        self.loaded = load(self._args.model)

    @override
    def measure(self, job: tuple[AnyCase, ...], progress: Progress) -> list[Row]:
        length = job[0].length
        if self._text is None or self._text[0] != length:
            progress.say(f"prefilling {length:,} tokens")
            self._text = (length, forced_text(self.loaded, self._args, length))
        weight = self.work(job) // (2 * len(job))
        return self.measure_group(job, self._text[1], progress, partial(_step, progress, weight))

    @override
    def figures(self) -> Row:
        name = model_name(self._args.model)
        return {"model": name, "disk": self._disk, "rows": self.rows, **self.summary()}


def _step(progress: Progress, weight: int, cases: int) -> None:
    progress.step(weight * cases)


def _measured_disk() -> dict[str, float]:
    """The real disk as a profile: seconds of a request, bytes per second, latency."""
    say("measuring the disk")
    measured = measure_directory("auto", file_bytes=128 << 20, seconds_per_cell=0.1)
    disk = fit_profile(measured.cells, name=DISK, sector_bytes=measured.sector_bytes)
    return {"request_s": disk.request_s, "bandwidth": disk.bandwidth, "latency_s": disk.latency_s}


def run_steps(
    kind: str, grid: type[StepGrid[AnyCase]], cases: Sequence[AnyCase], arguments: Sequence[str],
    args: argparse.Namespace,
) -> Result:  # fmt: skip
    """Measure what the command line asks for, print it and save it.

    Args:
        kind: of the result.
        cases: every row; those of one group follow on one another, and so do those of one length.

    Raises:
        PenstockError: bad input.
    """
    torch.manual_seed(args.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    settings = {k: v for k, v in vars(args).items() if k not in _PRIVATE}
    settings |= {"model": model_name(args.model), "text": "file" if args.prompt_file else args.task}
    settings["digest"] = digest_of_text(args.prompt_file)
    shown = without_path(arguments, "--prompt-file", args.prompt_file)
    try:
        result = Result.begin(kind, shown, settings, seed=args.seed, package="research")
        return sit(Sitting(result, args), grid(args, settings, cases), args)
    finally:
        torch.set_num_threads(threads)
