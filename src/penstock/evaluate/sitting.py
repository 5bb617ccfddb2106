"""Sitting: one run of a program whose result is saved as it grows and gone on with later."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same


class Sitting:
    """Keeps the result of a program with --out, --resume and --json, and its minutes.

    Attributes:
        former: what an earlier run left in --out, if this one goes on with it
    """

    def __init__(self, result: Result, args: argparse.Namespace) -> None:
        """Start the clock and read what is gone on with; without a file there is nothing.

        Args:
            result: of this run; its figures come with `keep`.
            args: have `out`, `resume` and `json`.

        Raises:
            ConfigError: no file is named; or it is no result of this program, or of another seed.
        """
        self.result, self._args = result, args
        self._began = time.perf_counter()
        self.former: Result | None = None
        if args.resume and not args.out:
            raise ConfigError("--resume goes on with the file of --out; name it")
        if args.resume and Path(args.out).exists():
            self.former = self._goes_on(args.out)
        self._minutes = 0.0 if self.former is None else float(self.former.figures["minutes"])

    def _goes_on(self, path: str) -> Result:
        try:
            former = Result.load(path)
        except ConfigError as error:
            raise ConfigError(f"cannot resume: {error}; name another --out") from error
        if former.kind != self.result.kind:
            raise ConfigError(
                f"cannot resume: {path} is a result of {former.kind}, not of {self.result.kind}"
            )
        check_same({"seed": former.seed}, {"seed": self.result.seed}, ["seed"])
        return former

    def keep(self, figures: dict[str, Any]) -> None:
        """Take figures in place of those before, with the minutes of all runs; save them."""
        minutes = self._minutes + (time.perf_counter() - self._began) / 60
        self.result.figures = {**figures, "minutes": minutes}
        if self._args.out:
            self.result.save(self._args.out)


def closed(result: Result, args: argparse.Namespace) -> Result:
    """The result, which is printed as the last line with --json."""
    if args.json:
        print(json.dumps(result.as_dict()))
    return result


def say(text: str) -> None:
    """A line on stderr: what is going on."""
    print(text, file=sys.stderr, flush=True)
