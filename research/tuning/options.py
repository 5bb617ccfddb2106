"""Options that both programs of `python -m research.tuning` have, and checks of them."""

import argparse
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.result import result_file
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a program's parser."""
    add = parser.add_argument
    add("--model", default=BUNDLED, choices=[BUNDLED, *ARCHITECTURES],
        help="the bundled model, or an architecture with random weights")  # fmt: skip
    add("--layers", type=int, help=f"of an architecture (default: {DEFAULT_LAYERS})")
    add("--memory", default="1/6", help="fast memory for KV: 1/6 of the full cache, 12MiB, ...")
    add("--devices", default="real,nvme,emmc", help="of " + ",".join(DEVICES))
    add("--store", default="auto", metavar="FOLDER", help="where the device `real` has its files")
    add("--floor", type=float, default=KL_FLOOR, help="most KL from full attention, in nats")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a tiny model and few settings, in seconds")
    add("--out", type=result_file, metavar="FILE", help="JSON file; beside it a journal for each "
        "device, with which an interrupted run goes on")  # fmt: skip
    add("--json", action="store_true", help="print the result as the last line")


def check_options(args: argparse.Namespace) -> None:
    """Put in place what depends on other options.

    Raises:
        ConfigError: a setting makes no sense.
    """
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


def require_positive(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse numbers below 1.

    Raises:
        ConfigError: names the first.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
