"""StepGrid: groups of methods that decode one forced text in turn, and the options of that."""

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.devices.measure import fit_profile
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.resuming import Row
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.models.loader import LoadedModel, load
from penstock.storage.measured_directory import measure_directory
from research.clusters.end_to_end_run import DISK, Case, ForcedText, Pace
from research.clusters.recording import model_name
from research.clusters.texts import RING_WALK, answer_of, digest_of_text, read_on
from research.grid import Grid

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
