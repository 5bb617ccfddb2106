"""Train a model: `python -m training.train training/configs/recall-2.toml`.

Leaves a folder with `log.jsonl`, `checkpoint.pt` and, at the end, `model/`. Stopped by Ctrl-C,
by SIGTERM or by `--minutes`, it saves a checkpoint; `--resume` goes on and comes to the same end.
A prose run reads `--corpus FOLDER` first. `--from` begins with another run's model.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, PenstockError
from training.fit import Fit, stretched
from training.gate import REFUSED, SeedRefused
from training.prose_settings import ProseSettings
from training.run_settings import AnySettings, read_run_settings
from training.settings import RunSettings
from training.video_settings import VideoSettings
from training.workers import BatchStream, Source

if TYPE_CHECKING:  # torch is not for the processes that make data, which import this file again
    import torch

    from training.feed import Packed
    from training.trainer import Trainer

LOG_S = 5.0
"""A line at least this often, and a record in the log."""
_FAR_TOKENS = 4500
"""Length of a row at which attention costs as much as all the rest: fitted to the tokens/s of the
recall-7m run on one H200 (within 6 % of most stages). Only time left is estimated by it."""
_WORKERS_MOST = 14
_LEAVE_S = 10.0
_FIT_HELP = (
    "end the decay so many minutes after the first step began: the rate follows the clock, the "
    "last stage is as long as the time allows; not the same bits twice"
)
_FROM_HELP = (
    "begin with the weights of a finished model of the same shape (a run's model/) instead of "
    "random ones, the optimizer anew; --resume goes on without it"
)
_STOPPING = (signal.SIGINT, signal.SIGTERM)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    add = parser.add_argument
    add("settings", help="TOML file, see training/configs")
    add("--out", help="folder of the run (default training/runs/NAME)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    add("--minutes", type=float, help="save and stop when this much time has passed")
    add("--fit", type=float, metavar="MINUTES", help=_FIT_HELP)
    add("--corpus", type=Path, help="folder with books.jsonl.xz and docs.jsonl.xz (prose runs)")
    add("--from", dest="begin", type=Path, metavar="FOLDER", help=_FROM_HELP)
    add("--resume", action="store_true", help="go on from the folder's checkpoint")
    add("--seed", type=int, help="instead of the settings' own; other text, other weights")
    add("--scale", type=float, default=1.0, help="this many times the steps of every stage")
    add("--workers", type=int, help="processes that make data (default: by cores; 0: none)")
    add("--export", action="store_true", help="only write model/ from the checkpoint")
    return parser.parse_args(arguments)


@dataclass
class Stop:
    """Why to stop, once there is a reason."""

    end: float
    """On the clock of time.perf_counter."""
    signal_name: str = ""

    def reason(self) -> str:
        """Empty while there is none."""
        if self.signal_name:
            return self.signal_name
        return "the time is up" if time.perf_counter() >= self.end else ""

    def take(self, number: int, frame: Any) -> None:
        """A signal has come; the second one of its kind kills."""
        self.signal_name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


class Log:
    """The run's JSONL file: one record a line, from all sittings."""

    def __init__(self, path: Path, *, steps_done: int) -> None:
        """Open it, without what a killed sitting wrote after the checkpoint."""
        kept = []
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= steps_done] if steps_done else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)
        self._path = path

    def add(self, kind: str, step: int, **figures: Any) -> None:
        """Append a record."""
        record = {"kind": kind, "step": step, **figures}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class Sitting:
    """One run of this program: as many steps as its time allows."""

    def __init__(
        self, settings: AnySettings, trainer: "Trainer", folder: Path, stop: Stop, log: Log,
        fit: Fit | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._trainer, self._folder = settings, trainer, folder
        self._stop, self._log, self._fit = stop, log, fit
        self._spent_before = trainer.spent_s
        self._began = self._looked = self._saved = time.perf_counter()
        self._wait_s = self._cost = 0.0
        self._tokens = self._tokens_looked = 0
        self._wait_looked = 0.0
        gate = None if isinstance(settings, ProseSettings) else settings.gate
        self._gate = None if gate and trainer.steps_done >= gate.step else gate

    def run(self, batches: Iterator["Packed"]) -> str:
        """Train; gives the reason for stopping, or nothing when the run is complete."""
        trainer, settings = self._trainer, self._settings
        complete = self._complete()
        while not complete and not self._stop.reason():
            asked = time.perf_counter()
            taken = list(islice(batches, settings.micro_batches))
            self._wait_s += time.perf_counter() - asked
            trainer.step(taken, self._rate())
            self._tokens += sum(batch.rows * batch.length for batch in taken)
            self._cost += _cost(settings, trainer.steps_done - 1)
            now = time.perf_counter()
            glance = trainer.steps_done % settings.evaluation.every_steps == 0
            complete = self._complete()
            if glance or complete or now - self._looked >= LOG_S:
                self._look()
            if glance or complete:
                self._glance()
            if now - self._saved >= 60 * settings.checkpoint_minutes:
                self.save()
        self.save()
        return "" if complete else self._stop.reason()

    def _complete(self) -> bool:
        if self._trainer.steps_done == self._settings.steps:
            return True
        return self._fit is not None and self._spent() >= self._fit.total_s

    def _spent(self) -> float:
        """Seconds of all sittings."""
        return self._spent_before + time.perf_counter() - self._began

    def _rate(self) -> float | None:
        """Factor of the learning rates, where the clock decides it."""
        if self._fit is None:
            return None
        return self._fit.rate(self._trainer.steps_done, self._spent())

    def save(self) -> None:
        """Write a checkpoint of a sound model."""
        from training.checkpoint import save_checkpoint

        if self._tokens > self._tokens_looked:
            self._look()  # raises if the loss is not a number
        self._trainer.spent_s = self._spent()
        save_checkpoint(self._folder, self._trainer.state_dict())
        self._saved = time.perf_counter()

    def _look(self) -> None:
        trainer, settings = self._trainer, self._settings
        figures = trainer.figures()
        now = time.perf_counter()
        tokens, wait_s = self._tokens - self._tokens_looked, self._wait_s - self._wait_looked
        rate, waited = tokens / (now - self._looked), wait_s / (now - self._looked)
        spent = now - self._began
        step = trainer.steps_done
        if self._fit is None:
            rest = sum(_cost(settings, step) for step in range(step, settings.steps))
            left_s, share = spent / self._cost * rest, step / settings.steps
        else:
            left_s, share = self._fit.total_s - self._spent(), self._spent() / self._fit.total_s
        longest = max(settings.stage_at(step - 1).lengths)
        say(
            f"{min(1, share):4.0%}  step {step:,} of {settings.steps:,}, rows to "
            f"{longest:,}, loss {figures.loss:.4f}, {rate / 1e6:.3f} Mtok/s, waited "
            f"{waited:.0%}, {_clock(spent)} gone, {_clock(max(0, left_s))} left"
        )
        rate_now = self._rate()
        rate_factor = settings.rate_at(step - 1) if rate_now is None else rate_now
        self._log.add(
            "train", step, tokens=step * settings.micro_batches * settings.micro_batch_tokens,
            loss=figures.loss, by_task=figures.by_task, tokens_per_s=rate, waited=waited,
            rate_factor=rate_factor, longest=longest, trained_s=trainer.trained_s,
        )  # fmt: skip
        self._looked, self._tokens_looked, self._wait_looked = now, self._tokens, self._wait_s
        if self._gate is not None and self._gate.check(step, figures.by_task):
            self._gate = None

    def _glance(self) -> None:
        began = time.perf_counter()
        seen, losses = list(self._trainer.glance()), self._trainer.held_back_loss()
        self._looked += time.perf_counter() - began  # no part of the training's tokens/s
        for length in dict.fromkeys(tokens for _, tokens, _, _ in seen):
            row = [f"{task} {exact:.2f}" for task, n, exact, _ in seen if n == length]
            say(f"      exact at {length:,} tokens: {', '.join(row)}")
        exact = [{"task": t, "tokens": n, "exact": e, "token_share": s} for t, n, e, s in seen]
        more = {"held_back": losses} if losses else {}
        if losses:
            told = ", ".join(f"{loss:.3f} in rows of {n}" for n, loss in losses.items())
            say(f"      loss on text that is held back: {told}")
        self._log.add("glance", self._trainer.steps_done, exact=exact, **more)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and say what happened. 0: complete; 3: stopped, to be resumed; 4: a seed that the
    settings' gate refuses; 2: cannot be."""
    began = time.perf_counter()
    args = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        return _main(args, began)
    except PenstockError as error:
        say(f"error: {error}")
        return REFUSED if isinstance(error, SeedRefused) else 2


def _main(args: argparse.Namespace, began: float) -> int:
    settings: AnySettings = read_run_settings(args.settings).scaled(args.scale)
    if args.seed is not None:
        settings = replace(settings, seed=args.seed)
    fit = None
    if args.fit is not None:
        fit, settings = Fit.of(settings, 60 * args.fit), stretched(settings)
    folder = Path(args.out or Path(__file__).parent / "runs" / settings.name)
    is_prose = isinstance(settings, ProseSettings)
    if is_prose != (args.corpus is not None):
        raise ConfigError(f"{settings.name} {'needs' if is_prose else 'takes no'} --corpus FOLDER")
    say(f"{settings.name}: {settings.steps:,} steps; loading torch")
    import torch

    from penstock.evaluate.machine import current_commit, describe_libraries, describe_machine
    from training.checkpoint import export, load_checkpoint
    from training.feed import AHEAD, Feed

    device = _device(args.device, torch.cuda.is_available())
    folder.mkdir(parents=True, exist_ok=True)
    state = load_checkpoint(folder)
    if state is not None and not (args.resume or args.export):
        raise ConfigError(f"{folder} has a checkpoint; give --resume, or another --out")
    source = _source(settings, args.corpus, folder, again=state is not None)
    steps_done = 0 if state is None else int(state["steps_done"])
    workers = _workers() if args.workers is None else args.workers
    first, last = (n * settings.micro_batches for n in (steps_done, settings.steps))
    first = last if args.export else first
    if device == "cuda":
        torch.set_num_threads(1)  # what is left to the CPU is small: threads would only wait
    ahead = AHEAD if workers else 0
    with (
        BatchStream(settings, source, first=first, last=last, workers=workers) as stream,
        Feed(
            stream,
            pin=device == "cuda",
            ahead=ahead,
            padded=device == "cuda" and settings.speed.graphs,
        ) as batches,
    ):
        trainer = _trainer(settings, source, torch.device(device))
        _take_up(trainer, state, args.begin)
        reason = ""
        if not args.export:
            end = began + 60 * args.minutes - _LEAVE_S if args.minutes else float("inf")
            stop = Stop(end)
            log = Log(folder / "log.jsonl", steps_done=steps_done)
            log.add(
                "begin", steps_done, settings=settings.as_dict(), machine=describe_machine(),
                libraries=describe_libraries(), commit=current_commit(), device=_name(device),
                date=datetime.now(UTC).isoformat(timespec="seconds"), fit_minutes=args.fit,
                begun_with=trainer.begun_with,
            )  # fmt: skip
            sitting = Sitting(settings, trainer, folder, stop, log, fit)
            say(f"{_name(device)}, attention {trainer.attention}, {workers} processes make data")
            with _signals(stop.take):
                reason = sitting.run(iter(batches))
    if reason:
        say(f"stopped at step {trainer.steps_done:,} ({reason}); --resume goes on from there")
        return 3
    export(
        trainer.model, folder / "model", _words_of(settings, source, folder),
        sharpen=settings.sharpen,
    )  # fmt: skip
    say(f"model after {trainer.steps_done:,} steps: {folder / 'model'}")
    return 0


def _words_of(settings: AnySettings, source: Source, folder: Path) -> Path:
    """The folder whose tokenizer the finished model has."""
    if isinstance(settings, VideoSettings):
        from training.video_words import write_processor

        return write_processor(folder / "processor")
    from training.checkpoint import TOKENIZER_FOLDER

    return source if isinstance(source, Path) else TOKENIZER_FOLDER


def _source(settings: AnySettings, corpus: Path | None, folder: Path, *, again: bool) -> Source:
    """What rows are made from; a corpus is prepared, into the run's folder, or is `again` the one
    that is there."""
    if isinstance(settings, ProseSettings):
        from training.corpus import prepare

        assert corpus is not None
        return prepare(
            corpus, folder / "corpus", settings.corpus, settings.model.positions, say, again=again
        ).folder
    if isinstance(settings, VideoSettings):
        from training.video_words import vocabulary

        return vocabulary()
    from training.checkpoint import read_vocabulary

    return read_vocabulary()


def _trainer(settings: AnySettings, source: Source, device: "torch.device") -> "Trainer":
    if isinstance(settings, ProseSettings):
        from training.prose_trainer import ProseTrainer

        assert isinstance(source, Path)
        return ProseTrainer(settings, source, device)
    assert not isinstance(source, Path)
    if isinstance(settings, VideoSettings):
        from training.video_trainer import VideoTrainer

        return VideoTrainer(settings, source, device)
    from training.trainer import Trainer

    return Trainer(settings, source, device)


def _take_up(trainer: "Trainer", state: dict[str, Any] | None, begin: Path | None) -> None:
    """Go on from a checkpoint, begin with a model's weights, or with random ones."""
    from training.checkpoint import sum_of

    if state is None:
        if begin is not None:
            trainer.begin_with(begin)
        return
    trainer.load_state_dict(state)
    if begin is not None and (trainer.begun_with or {}).get("sha256") != sum_of(begin):
        raise ConfigError(
            f"the checkpoint is of a run that did not begin with {begin}; leave out --from, or "
            "give another --out"
        )


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals(take: Callable[[int, Any], None]) -> Iterator[None]:
    """While it is entered, Ctrl-C and SIGTERM ask for a stop after the step."""
    before = {number: signal.signal(number, take) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cost(settings: RunSettings, step: int) -> float:
    """Of a step, in any unit: the mean over its stage's lengths."""
    lengths = settings.stage_at(step).lengths
    return sum(1 + length / _FAR_TOKENS for length in lengths) / len(lengths)


def _device(asked: str | None, there_is_cuda: bool) -> str:
    if asked == "cuda" and not there_is_cuda:
        raise ConfigError("--device cuda, but this machine (or build of torch) has no CUDA GPU")
    return asked or ("cuda" if there_is_cuda else "cpu")


def _name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_WORKERS_MOST, (cores or 2) - 2))


def _step_of(line: str) -> int:
    """Of a record; a line that a killed sitting left half written counts as later than all."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return sys.maxsize


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
