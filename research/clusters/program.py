"""`python -m research.clusters`: DynaKV's premise and parts, measured on recorded keys."""

import argparse
from collections.abc import Sequence

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.models.loader import load
from research.clusters.recording import add_recording_options, begin_recording, facts_of, record
from research.clusters.replay import Settings
from research.clusters.run import PARTS, Run
from research.clusters.table import clusters_table
from research.clusters.texts import RING_WALK

KIND = "clusters"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range.
    """
    parser = argparse.ArgumentParser(prog="python -m research.clusters", description=__doc__)
    add = parser.add_argument
    add_recording_options(parser, task=RING_WALK, prompt=1024, output=2048)
    add("--parts", default=",".join(PARTS), help="of " + ",".join(PARTS))
    add("--cluster-tokens", type=int, default=16, help="mean size of an initial cluster")
    add("--top", type=float, default=0.1, help="share of the past that is retrieved")
    add("--buffers", default="0,1,2,4,8,16,32", help="entries that may wait for splits")
    add("--buffer-layers", type=int, default=4, help="layers that --buffers is measured in")
    add("--layout-layers", type=int, default=2, help="layers that are laid out in files")
    args = read_options(parser, arguments, resume=False, minutes=False)
    least = min(args.prompt, args.output, args.cluster_tokens, args.buffer_layers,
                args.layout_layers, args.chunk)  # fmt: skip
    if least < 1 or not 0 < args.top <= 1 or args.prompt < 2 * args.cluster_tokens:
        raise ConfigError(
            "sizes must be at least 1, --top above 0 and at most 1, and --prompt at least two "
            "clusters of --cluster-tokens"
        )
    if unknown := set(args.parts.split(",")) - set(PARTS):
        raise ConfigError(f"no part is called {min(unknown)!r}; there are {', '.join(PARTS)}")
    return args


def buffer_sizes(text: str) -> list[int]:
    """The numbers of --buffers.

    Raises:
        ConfigError: one is not a number, or negative.
    """
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--buffers takes numbers like 0,4,16, not {text!r}") from error
    if found[0] < 0:
        raise ConfigError(f"--buffers must not be negative: {text}")
    return found


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    buffers = buffer_sizes(args.buffers)
    torch.manual_seed(args.seed)
    result = begin_recording(KIND, arguments, args)
    shared = Settings(cluster_tokens=args.cluster_tokens, top=args.top, seed=args.seed)
    loaded = load(args.model)
    stream = record(loaded, args, prompt_tokens=args.prompt, output_tokens=args.output)
    entry_bytes = 2 * stream.keys[0].shape[2] * loaded.model.dtype.itemsize
    result.figures |= {**facts_of(stream, args), "entry_bytes": entry_bytes}
    runs = Run(
        stream, shared, result.figures, buffers=buffers, buffer_layers=args.buffer_layers,
        layout_layers=args.layout_layers,
    )  # fmt: skip

    def save() -> None:
        if args.out:
            result.save(args.out)

    runs.measure(args.parts.split(","), save)
    print(clusters_table(result.figures))
    return closed(result, args)
