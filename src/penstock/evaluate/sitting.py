"""Sitting: one run of a program whose result is saved as it grows and gone on with later."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same


class Sitting:
    """Keeps the result of a program with --output, --resume and --json, and its minutes.

    Attributes:
        former: what an earlier run left in --output, if this one goes on with it
    """

    def __init__(self, result: Result, args: argparse.Namespace) -> None:
        """Start the clock and read what is gone on with; without a file there is nothing.

        Args:
            result: of this run; its figures come with `keep`.
            args: have `out`, and `resume`, `json` and `minutes` where the program has them.

        Raises:
            ConfigError: what is gone on with is no result of this program, or of another seed.
        """
        self.result, self._args = result, args
        self._began = time.perf_counter()
        self.former: Result | None = None
        if getattr(args, "resume", False) and Path(args.out).exists():
            self.former = self._goes_on(args.out)
        self._minutes = 0.0 if self.former is None else float(self.former.figures["minutes"])

    def _goes_on(self, path: str) -> Result:
        try:
            former = Result.load(path)
        except ConfigError as error:
            raise ConfigError(f"cannot resume: {error}; name another --output") from error
        if former.kind != self.result.kind:
            raise ConfigError(
                f"cannot resume: {path} is a result of {former.kind}, not of {self.result.kind}"
            )
        check_same({"seed": former.seed}, {"seed": self.result.seed}, ["seed"])
        return former

    @property
    def _spent(self) -> float:
        """Minutes of this run."""
        return (time.perf_counter() - self._began) / 60

    def time_is_up(self) -> bool:
        """Whether --minutes have passed; said on stderr, once it is so."""
        most = getattr(self._args, "minutes", None)
        if most is None or self._spent <= most:
            return False
        goes_on = "; --resume goes on" if hasattr(self._args, "resume") else ""
        say(f"time is up after {self._spent:.1f} minutes{goes_on}")
        return True

    def keep(self, figures: dict[str, Any]) -> None:
        """Take figures in place of those before, with the minutes of all runs; save them."""
        self.result.figures = {**figures, "minutes": self._minutes + self._spent}
        self.save()

    def save(self) -> None:
        """Write the result as it is, if the command line names a file."""
        if self._args.out:
            self.result.save(self._args.out)


class Work(Protocol):
    """What a program measures, as `sit` runs it."""

    def take_up(self, former: Result) -> None:
        """Keep what an earlier run measured.

        Raises:
            ConfigError: that run was asked for something else.
        """

    def run(self, sitting: Sitting) -> None:
        """Measure what is left; each piece is kept (`Sitting.keep`) when it is there."""

    def figures(self) -> dict[str, Any]:
        """All that has been measured, for the result."""

    def report(self) -> str:
        """The tables."""


def sit(sitting: Sitting, work: Work, args: argparse.Namespace) -> Result:
    """Go on with the former run, measure what is left, and print the tables.

    Ctrl-C and errors pass when what there is has been saved; tables are printed if this run
    measured anything.

    Raises:
        PenstockError: the work failed.
    """
    if sitting.former is not None:
        work.take_up(sitting.former)
    before = sitting.result.figures
    stopped: KeyboardInterrupt | PenstockError | None = None
    try:
        work.run(sitting)
    except (KeyboardInterrupt, PenstockError) as error:
        stopped = error
    finally:
        measured = sitting.result.figures is not before
        sitting.keep(work.figures())
    if stopped is None or measured:
        closed(sitting.result, args, work.report())
    if stopped is not None:
        raise stopped
    return sitting.result


def closed(result: Result, args: argparse.Namespace, report: str = "") -> Result:
    """Save the result, print the report, and with --json the result as the last line."""
    if args.out:
        result.save(args.out)
    if report:
        print(report)
    if args.json:
        print(json.dumps(result.as_dict()))
    return result


def say(text: str) -> None:
    """A line on stderr: what is going on."""
    print(text, file=sys.stderr, flush=True)
