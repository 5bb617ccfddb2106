"""`penstock bench documents`: first tokens of reopened documents, and rates of checked reading.

Parts: "reopen" stores a document of each length, reopens it, asks questions, and does the same with
a new cache; "encryption" reads random units with and without a key, in turns; "verify" checks a
store beside plain reading of its files, in turns. All reads are direct: no page cache.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.documents.rates import measure_encryption, measure_verify
from penstock.evaluate.documents.reopen import Case, measure
from penstock.evaluate.documents.table import documents_table
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same, grow
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.models.loader import load

PARTS = ("reopen", "encryption", "verify")
KIND = "documents"
ANSWER_TOKENS = 40
_CHUNK = 1024


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="penstock bench documents", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    add("--lengths", default="4096,8192,16384,32768", help="tokens of the documents")
    add("--memory", default="1/13", help="budget of each cache")
    add("--questions", type=int, default=10)
    add("--rounds", type=int, default=3, help="reopenings, and turns of the rates")
    add("--units", default="4096,16384", help="bytes of a unit, for the rates")
    add("--gigabytes", type=float, default=4.0, help="of the store that is checked")
    add("--disk", dest="store", default="auto", help="directory of the documents")
    args = read_options(
        parser, arguments, minutes=False,
        renamed={"--store": "--disk"},
    )  # fmt: skip
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in PARTS:
            raise ConfigError(f"--parts: there is no {part!r}; take of {', '.join(PARTS)}")
    args.lengths = whole_numbers(args.lengths, "--lengths")
    args.units = whole_numbers(args.units, "--units")
    small = [args.questions, args.rounds, args.gigabytes, *args.units]
    if min(args.lengths) < 512 or min(small) <= 0:
        raise ConfigError("--lengths are 512 at least, and all other numbers above 0")
    return args


def run(arguments: Sequence[str]) -> Result:
    """Measure what the arguments ask for."""
    args = parse_arguments(arguments)
    settings: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("parts", "lengths", "memory", "questions", "rounds", "units", "gigabytes")
    }
    settings |= {"model": "recall", "chunk": _CHUNK}
    result = Result.begin(KIND, arguments, settings, seed=args.seed, store=args.store)
    return sit(Sitting(result, args), _Parts(args, result), args)


class _Parts:
    """What is measured, part by part."""

    def __init__(self, args: argparse.Namespace, result: Result) -> None:
        self._args, self._result, self._figures = args, result, dict[str, Any]()

    def take_up(self, former: Result) -> None:
        """Keep the parts that are there."""
        settings = self._result.settings
        check_same(former.settings, settings, [name for name in settings if name != "parts"])
        grow(settings, former.settings, ["parts"])
        self._figures = dict(former.figures)

    def run(self, sitting: Sitting) -> None:
        """Measure the others."""
        args = self._args
        place = None if args.store == "auto" else args.store
        with tempfile.TemporaryDirectory(prefix="penstock-documents-", dir=place) as folder:
            for part in args.parts:
                if part not in self._figures:
                    self._figures[part] = _PARTS[part](args, Path(folder))
                    sitting.keep(self._figures)

    def figures(self) -> dict[str, Any]:
        """Rows of each part."""
        return self._figures

    def report(self) -> str:
        """The tables."""
        return documents_table(self._result)


def _reopen(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    loaded = load("recall")
    rows = []
    for tokens in args.lengths:
        say(f"a document of {tokens:,} tokens")
        case = Case(
            loaded=loaded, tokens=tokens, questions=args.questions, answer_tokens=ANSWER_TOKENS,
            memory=args.memory, chunk=_CHUNK, rounds=args.rounds, folder=folder / str(tokens),
            seed=args.seed,
        )  # fmt: skip
        rows.append(measure(case))
        shutil.rmtree(case.folder)
    return rows


def _encryption(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for unit_bytes in args.units:
        say(f"units of {unit_bytes:,} bytes with and without a key")
        place = folder / f"encryption-{unit_bytes}"
        rows.append(
            measure_encryption(
                place, layers=8, unit_bytes=unit_bytes, total_bytes=int(args.gigabytes * 2**27),
                rounds=args.rounds, batch=100, seconds=2.0, seed=args.seed,
            )
        )  # fmt: skip
        shutil.rmtree(place)
    return rows


def _verify(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for unit_bytes in args.units:
        say(f"checking {args.gigabytes:g} GiB in units of {unit_bytes:,} bytes")
        place = folder / f"verify-{unit_bytes}"
        rows.append(
            measure_verify(
                place, layers=8, unit_bytes=unit_bytes, total_bytes=int(args.gigabytes * 2**30),
                rounds=args.rounds,
            )
        )  # fmt: skip
        shutil.rmtree(place)
    return rows


_PARTS = {"reopen": _reopen, "encryption": _encryption, "verify": _verify}
