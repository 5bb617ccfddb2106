"""Sitting: one run of a program whose result is saved as it grows and gone on with later."""

import argparse
import json
import sys
import time
from typing import Any

from penstock.bench.result import Result
from penstock.core.errors import ConfigError


class Sitting:
    """Keeps the result of a program with --out, --resume and --json, and its minutes.

    Attributes:
        former: what an earlier run left in --out, if this one goes on with it
    """

    def __init__(self, result: Result, args: argparse.Namespace) -> None:
        """Start the clock and read what is gone on with; a file that is no result counts as none.

        Args:
            result: of this run; its figures come with `keep`.
            args: have `out`, `resume` and `json`.
        """
        self.result, self._args = result, args
        self._began = time.perf_counter()
        self.former: Result | None = None
        if args.resume and args.out:
            try:
                self.former = Result.load(args.out)
            except ConfigError:
                self.former = None
        self._minutes = 0.0 if self.former is None else float(self.former.figures["minutes"])

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
