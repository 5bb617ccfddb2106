"""`python -m research.near_storage.smartssd`: HillInfer on a simulated SmartSSD PC.

A model, not a measurement: the paper's machine as published figures and assumptions, each with its
source in the result. How much of a selection is hot comes from recorded decodes where --locality
names a result of `research.near_storage placement`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from research.near_storage.smartssd_constants import SHAPES, Constants, listed
from research.near_storage.smartssd_hillinfer import VARIANTS
from research.near_storage.smartssd_locality import ASSUMED_LOCALITY, read_locality
from research.near_storage.smartssd_places import Locality, Workload
from research.near_storage.smartssd_sweep import (
    PAPER_SPEEDUP,
    RIVALS,
    batches,
    by_locality,
    calibration,
    host_memory,
    lengths,
    needed,
    sensitivity,
    speedup,
    splits,
)
from research.near_storage.smartssd_table import smartssd_table

KIND = "near_storage.smartssd"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range, or a model is not known.
    """
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--models", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    add("--lengths", default="4,8,12,16,24,36", help="contexts in units of 1,024 tokens")
    add("--batch", type=int, default=8)
    add("--alpha", type=float, default=0.2, help="share of the tokens that is selected")
    add("--locality", metavar="FILES", help="results of the placement bench, the first for all that"
        " is shown, the others for speed-ups beside it; default: assumed")  # fmt: skip
    add("--variant", default=VARIANTS[1].name, choices=[one.name for one in VARIANTS],
        help="whose sensitivity is shown")  # fmt: skip
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    try:
        args.lengths = sorted({int(number) for number in args.lengths.split(",")})
    except ValueError as error:
        raise ConfigError(f"--lengths takes numbers like 4,12, not {args.lengths!r}") from error
    if min(args.lengths) < 1 or args.batch < 1 or not 0 < args.alpha < 1:
        raise ConfigError("--lengths and --batch must be at least 1, --alpha between 0 and 1")
    args.models = args.models.split(",")
    if unknown := set(args.models) - set(SHAPES):
        raise ConfigError(f"no model is called {min(unknown)!r}; there are {', '.join(SHAPES)}")
    return args


def measure(args: argparse.Namespace, localities: Sequence[Locality]) -> dict[str, Any]:
    """Everything that the model is asked."""
    pc, locality = Constants(), localities[0]

    def work(model: str, tokens: int) -> Workload:
        return Workload(
            shape=SHAPES[model], tokens=1024 * tokens, batch=args.batch, alpha=args.alpha
        )

    works = [work(model, tokens) for model in args.models for tokens in args.lengths]
    ours = next(one for one in VARIANTS if one.name == args.variant)
    middle = work(args.models[0], 12)
    longest = work(args.models[0], args.lengths[-1])
    target = PAPER_SPEEDUP[0]
    about = {"method": ours.name, "model": longest.shape.name, "tokens": longest.tokens}
    return {
        "simulated": True, "constants": listed(pc), "locality": asdict(locality),
        "paper_speedup": list(PAPER_SPEEDUP), "rows": lengths(pc, works, locality),
        "splits": splits(pc, middle, longest, locality),
        "sensitivity": {
            **about, "rows": sensitivity(pc, longest, locality, ours),
            "speedups": {name: speedup(pc, longest, locality, ours, name) for name in RIVALS},
        },
        "needed": {
            **about, "target": target, "rows": needed(pc, longest, locality, ours, target)
        },
        "by_locality": by_locality(
            pc, [work(args.models[0], tokens) for tokens in args.lengths], localities
        ),
        "host_memory": [
            row for each in (middle, longest) for row in host_memory(pc, each, locality, ours)
        ],
        "calibration": calibration(pc), "batches": batches(pc, locality, ours),
    }  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Ask the model, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    localities = [ASSUMED_LOCALITY]
    if args.locality:
        localities = [read_locality(path, args.alpha) for path in args.locality.split(",")]
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "locality")}
    shown = [one if not one.removeprefix("--locality=").startswith("/") else "PATH"
             for one in arguments]  # fmt: skip
    result = Result.begin(KIND, shown, settings, seed=0, package="research")
    result.figures |= measure(args, localities)
    if args.out:
        result.save(args.out)
    print(f"Simulated, not measured. Locality: {localities[0].source}\n")
    print(smartssd_table(result.figures))
    return closed(result, args)


if __name__ == "__main__":
    run_program(run)
