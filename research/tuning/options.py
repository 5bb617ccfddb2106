"""Options that both programs of `python -m research.tuning` have, and checks of them."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.models.loader import BUNDLED
from penstock.models.plain_model import ARCHITECTURES
from penstock.tuner.fidelity import KL_FLOOR

REAL = "real"
"""The device that stands for this machine's own disk."""
DEVICES = (REAL, *PRESETS, "memory")
QUICK: dict[str, Any] = {
    "model": "tiny", "memory": "1/2", "devices": "memory,nvme",
}  # fmt: skip
"""A run of seconds, to see that everything works."""
DEFAULT_LAYERS = 4
PRIVATE = ("out", "json", "quick", "store")
"""Options that say nothing about what is measured, or hold a path."""


def read_tuning_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], positive: Sequence[str],
    quick: Mapping[str, Any] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """Add the options that all programs have to one's own, and read the command line.

    Args:
        positive: options whose numbers are at least 1.
        quick: defaults of the program's own options with --quick.

    Raises:
        ConfigError: a setting makes no sense.
    """
    add = parser.add_argument
    add("--model", default=BUNDLED, choices=[BUNDLED, *ARCHITECTURES],
        help="the bundled model, or an architecture with random weights")  # fmt: skip
    add("--layers", type=int, help=f"of an architecture (default: {DEFAULT_LAYERS})")
    add("--memory", default="1/6", help="fast memory for KV: 1/6 of the full cache, 12MiB, ...")
    add("--devices", default="real,nvme,emmc", help="of " + ",".join(DEVICES))
    add("--store", default="auto", metavar="FOLDER", help="where the device `real` has its files")
    add("--floor", type=float, default=KL_FLOOR, help="most KL from full attention, in nats")
    add("--quick", action="store_true", help="a tiny model and few settings, in seconds")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK, **(quick or {}))
    out = "the result; beside it a journal for each device, with which an interrupted run goes on"
    args = read_options(parser, arguments, resume=False, minutes=False, out=out)
    devices = list(dict.fromkeys(args.devices.split(",")))
    for name in devices:
        if name not in DEVICES:
            raise ConfigError(f"--devices: {name!r} is none of {', '.join(DEVICES)}")
    args.devices = devices
    if args.model == BUNDLED and args.layers is not None:
        raise ConfigError(f"--layers is for architectures; {BUNDLED} has its own")
    if args.model != BUNDLED:
        most = int(ARCHITECTURES[args.model](1).num_hidden_layers)
        args.layers = min(DEFAULT_LAYERS, most) if args.layers is None else args.layers
        if not 2 <= args.layers <= most:
            raise ConfigError(f"--layers {args.layers} must be 2 (to predict) to {most}")
    if args.floor <= 0:
        raise ConfigError(f"--floor {args.floor} must be above 0")
    for name in positive:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    return args


class Bench(Protocol):
    """What a program measures."""

    def run(self) -> None:
        """Measure; the result has what is finished."""

    def forget(self) -> None:
        """Remove the journals, with which an interrupted run goes on: all is in the result."""


def run_bench(
    kind: str, make: Callable[[argparse.Namespace, Result], Bench],
    table: Callable[[dict[str, Any]], str], arguments: Sequence[str], args: argparse.Namespace,
) -> Result:  # fmt: skip
    """Measure everything that the command line asks for, print it and save it.

    Args:
        kind: of the result.
        make: loads the model.
        table: of the figures.

    Raises:
        PenstockError: bad input, or a device failed.
    """
    settings: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in PRIVATE}
    result = Result.begin(
        kind, arguments, settings, seed=args.seed, store=args.store, package="research"
    )
    bench = make(args, result)
    bench.run()
    if args.out:
        result.save(args.out)
        bench.forget()
    print(table(result.figures))
    return closed(result, args)
