"""`python -m research.tuning`: choose between the programs `sweep`, `predict` and `auto`."""

import argparse
from collections.abc import Sequence
from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.tuning import auto, predict, sweep


class Program(Protocol):
    """A module that is one."""

    def parse_arguments(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read its command line."""

    def run(self, arguments: Sequence[str]) -> Result:
        """Do it."""


PROGRAMS: dict[str, Program] = {"sweep": sweep, "predict": predict, "auto": auto}
_HELP = (
    "usage: python -m research.tuning {sweep,predict,auto} [options]\n\n"
    "  sweep    the tuner's pick beside the best of all settings, each of them run\n"
    "  predict  predicted beside measured tokens/s over batches, contexts and devices\n"
    "  auto     the pick of all policies beside every single one\n\n"
    "--help behind a program's name lists its options"
)


def _program(arguments: Sequence[str]) -> Program:
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP)
        raise SystemExit(0)
    if not arguments or arguments[0] not in PROGRAMS:
        asked = f"not {arguments[0]!r}" if arguments else "none was given"
        raise ConfigError(
            f"python -m research.tuning needs a program, {', '.join(PROGRAMS)}; {asked}"
        )
    return PROGRAMS[arguments[0]]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line: the program's name, then its options."""
    return _program(arguments).parse_arguments(arguments[1:])


def run(arguments: Sequence[str]) -> Result:
    """Run the program that the first argument names."""
    return _program(arguments).run(arguments[1:])
