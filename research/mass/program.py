"""`python -m research.mass`: estimated beside true mass, step by step, and what it costs."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import encode
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import LoadedModel, load
from penstock.models.weight_access import model_device
from research.mass.steps import MassSteps
from research.verified.program import begun, text_of

Row = dict[str, Any]
_KEPT_EVERY = 250
"""Steps after which a row is saved as far as it is."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.mass", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--skip", type=int, default=0, metavar="TOKENS", help="of the text, in front")
    add("--tokens", type=int, default=2000, help="length of the prompt")
    add("--steps", type=int, default=100, help="tokens that are decoded behind it")
    add("--mass", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    add("--floor", type=float, help="of a further row for each way to be below it")
    add("--selected", type=int, nargs="*", default=[400], help="tokens of rows without mass=")
    add("--memory", default="1/4")
    add("--disk", default="memory")
    add("--device", default="cpu")
    add("--dtype", default="float32")
    add("--chunk", type=int, default=1024)
    return read_options(parser, arguments, seed=False, resume=False, minutes=False)


def policies_of(args: argparse.Namespace) -> dict[str, KVSwap]:
    """What is measured, by name."""
    rows = {f"{count} tokens": KVSwap(selected_tokens=count) for count in args.selected}
    for mass in args.mass:
        policy = KVSwap(mass=mass)
        rows[f"mass={mass:g}"] = policy
        if args.floor is not None:
            rows[f"mass={mass:g}, again below {args.floor:g}"] = replace(policy, floor=args.floor)
            rows[f"mass={mass:g}, exact below {args.floor:g}"] = replace(
                policy, floor=args.floor, below="exact"
            )
    return rows


def measure(
    loaded: LoadedModel, ids: list[int], policy: KVSwap, args: argparse.Namespace,
    progress: Progress,
) -> Iterator[Row]:  # fmt: skip
    """Decode the text under a policy; figures of `MassSteps` now and then, and at the end."""
    tokens = torch.tensor([ids], device=model_device(loaded.model))
    with TieredCache(
        loaded.model, policy, args.memory, args.disk, max_tokens=len(ids),
        prompt_tokens=args.tokens, must_tier=True,
    ) as cache:  # fmt: skip
        run = MassSteps(loaded.model, cache)
        run.prefill(tokens[:, : args.tokens], args.chunk)
        for step in range(1, args.steps + 1):
            at = args.tokens + step - 1
            run.decode(tokens[:, at : at + 1])
            progress.add("steps", 1)
            if step % _KEPT_EVERY and step < args.steps:
                continue
            report = cache.report()
            yield {
                **run.figures(), "slots": cache.plan.num_slots, "memory_bytes": report.peak_bytes,
                "full_cache_bytes": report.full_cache_bytes, "simulated": cache.simulated,
            }  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """A row for each policy."""
    cells = [
        [
            row["what"], f"{row['true_mass']:.3f}", f"{row['said_mass']:.3f}",
            f"{row['mean_error']:+.4f}", f"{row['mean_absolute_error']:.4f}", f"{row['bar']:.4f}",
            f"{row['held_by_bars']:.1%}", f"{row['attended_tokens']:.0f}",
            f"{row['wanted_units']:.0f}", f"{row['capped']:.0%}",
            f"{row['read_again'] + row['exact']:.1%}", f"{row['read_bytes'] / 2**20:.2f}",
            f"{1000 * row['seconds']:.0f}",
        ]
        for row in figures["rows"]
    ]  # fmt: skip
    header = ["", "true mass", "said", "error", "|error|", "bar", "held", "attended", "units",
              "capped", "below", "MiB read", "ms"]  # fmt: skip
    head = (
        f"{figures['model']}, {figures['prompt_tokens']:,} tokens, {figures['steps']:,} steps, "
        f"{figures['disk']}, {figures['memory']} of the full cache; rows without mass= say nothing"
    )
    return f"{head}\n{format_table(header, cells)}"


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, and save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    result = begun("mass", arguments, args)
    sitting = Sitting(result, args)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    ids = encode(loaded, text_of(args.text or []), alone=False)
    ids = list(ids[args.skip : args.skip + args.tokens + args.steps])
    if len(ids) < args.tokens + args.steps:
        raise ConfigError(f"the text has {len(ids):,} tokens behind --skip; give more --text")
    rows: list[Row] = []
    figures = {
        "model": Path(args.model).name, "prompt_tokens": args.tokens, "steps": args.steps,
        "disk": result.settings["disk"], "memory": args.memory, "rows": rows,
    }  # fmt: skip
    wanted = policies_of(args)
    progress = Progress(len(wanted) * args.steps)
    for what, policy in wanted.items():
        progress.say(what)
        rows.append({"what": what, "steps": 0})
        for found in measure(loaded, ids, policy, args, progress):
            rows[-1] = {"what": what, **found}
            sitting.keep(figures)
    return closed(result, args, table(figures))
