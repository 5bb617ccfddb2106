"""`python -m research.trigger_study`: when a selection is due (LouisKV, section 4.1).

A pretrained model goes on with a text, or answers a question about one, with full attention. Its
keys and queries are followed afterwards: LouisKV's units, a first selection, and a new one where a
trigger says so. What that captures is true attention.
"""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import penstock.generation
from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import read_text_file
from penstock.models.loader import load
from penstock.tuner.shipped_texts import TEXTS
from research.trigger_study.capture import Capture, Case, capture
from research.trigger_study.follow import SCORES, TRIGGERS, Outcome, Variant, follow, variants
from research.trigger_study.units import Window, layer_steps

KIND = "trigger_study"
CASES = ("prose", "code", "answer")
_SETTINGS = (
    "tokens", "steps", "budget", "window", "sinks", "cluster", "block", "layers", "on", "dtype",
    "cases",
)  # fmt: skip
MEASURES = {"captured": "the captured mass of", "lost": "the lost mass of"}
LEVELS = (2, 4, 8)
"""Strides whose captured mass the others are asked for."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a folder or a name, as `penstock run` takes it")
    add("--prose", type=Path, help="a text (UTF-8) that goes on as it was written")
    add("--code", type=Path, help="source code, alike")
    add("--answer", type=Path, help="a text that the model retells, greedily, in its chat template")
    add("--cases", nargs="+", choices=CASES, default=CASES, help="of these three; the texts that "
        "ship where no file is given")  # fmt: skip
    add("--tokens", type=int, default=8192, help="of the prompt")
    add("--steps", type=int, default=512, help="decode steps; an answer must have as many")
    add("--budget", type=int, default=512, help="tokens of a selection")
    add("--window", type=int, default=256)
    add("--sinks", type=int, default=64)
    add("--cluster", type=int, default=16, help="tokens of a unit on average")
    add("--block", type=int, default=4096, help="prompt tokens that are clustered together")
    add("--layers", type=int, nargs="+", help="of the model (default: all)")
    add("--on", default="cpu", choices=("cpu", "cuda"))
    add("--dtype", help="of the weights (default: as stored)")
    add("--captures", type=Path, help="folder where keys and queries are kept and found again")
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    least = args.window + args.sinks + args.budget
    if args.tokens <= least or args.steps < 2:
        raise ConfigError(
            f"--tokens must be more than window, sinks and budget ({least}), --steps at least 2"
        )
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    """What is followed, with its text."""
    return [
        Case(name=name, text=_text(args, name), answers=name == "answer")
        for name in args.cases
    ]  # fmt: skip


def _text(args: argparse.Namespace, name: str) -> str:
    if (path := getattr(args, name)) is not None:
        return read_text_file(path, "text")
    if name != "code":
        return (TEXTS / "prose.txt").read_text(encoding="utf-8")
    files = sorted(Path(penstock.generation.__file__).parent.glob("*.py"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def mean_rows(
    case: str, every: Sequence[Variant], outcomes: Sequence[Outcome]
) -> list[dict[str, Any]]:
    """A row for each variant: means over layers."""
    names = ("share", "fetched", "captured", "lost")
    means = {
        name: torch.stack([getattr(one, name) for one in outcomes]).mean(dim=0).tolist()
        for name in names
    }
    return [
        {
            "case": case, "trigger": one.trigger, "threshold": one.threshold, "keep": one.keep,
            "scores": one.scores, **{name: means[name][number] for name in names},
        }
        for number, one in enumerate(every)
    ]  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Follow every text, print and save the table."""
    args = parse_arguments(arguments)
    device = torch.device(args.on)
    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings["model"] = Path(args.model).name
    cases = cases_of(args)
    settings["shipped"] = [case.name for case in cases if getattr(args, case.name) is None]
    shown = list(arguments)
    for option in ("model", "captures", "prose", "code", "answer"):
        shown = without_path(shown, f"--{option}", str(getattr(args, option)))
    result = Result.begin(KIND, shown, settings, seed=0, package="research")
    loaded = load(args.model, dtype=args.dtype, device=args.on)
    window = Window(
        window=args.window, sinks=args.sinks, cluster=args.cluster, block=args.block
    )  # fmt: skip
    every, rows, told = variants(), [], {}
    for case in cases:
        reading = Progress(args.tokens + args.steps)
        taken = capture(
            loaded, case, prompt_tokens=args.tokens, steps=args.steps, file=_file(args, case),
            progress=reading.up_to(f"{case.name}: full attention"),
        )  # fmt: skip
        told[case.name] = {
            "prompt_tokens": taken.prompt_tokens, "steps": taken.queries.shape[1],
            "answer": taken.answer[:400],
        }  # fmt: skip
        rows += mean_rows(case.name, every, _outcomes(args, taken, case, window, device, every))
        result.figures = {"rows": rows, "cases": told}
        if args.out:
            result.save(args.out)
    return closed(result, args, report(result))


def _outcomes(
    args: argparse.Namespace, taken: Capture, case: Case, window: Window, device: torch.device,
    every: Sequence[Variant],
) -> list[Outcome]:  # fmt: skip
    layers = range(len(taken.keys)) if args.layers is None else args.layers
    progress, outcomes = Progress(len(layers)), []
    with torch.no_grad():
        for layer in layers:
            outcomes.append(follow(layer_steps(taken, layer, window, device), args.budget, every))
            progress.add(f"{case.name}: layer {layer}", 1)
    return outcomes


def _file(args: argparse.Namespace, case: Case) -> Path | None:
    if args.captures is None:
        return None
    name = f"{Path(args.model).name}-{case.name}-{args.tokens}-{args.steps}.safetensors"
    return Path(args.captures) / name


# Tables -------------------------------------------------------------------------------------------


def report(result: Result) -> str:
    """Every variant of every case, then the shares that triggers need."""
    rows = result.figures["rows"]
    parts = []
    for case in dict.fromkeys(row["case"] for row in rows):
        lines = [
            [
                _title(row), f"{row['share']:.3f}", f"{row['fetched']:.3f}",
                f"{row['captured']:.3f}", f"{row['lost']:.4f}",
            ]
            for row in rows if row["case"] == case
        ]  # fmt: skip
        heads = [case, "retrieves", "read", "captured", "lost"]
        parts.append(format_table(heads, lines))
    for measure, title in MEASURES.items():
        parts.append(format_table(
            [f"share of steps for {title}", *(f"stride {stride}" for stride in LEVELS)],
            [
                [f"{case}, {name}", *(_number(needed) for needed in shares)]
                for case, name, shares in needed_shares(rows, measure)
            ],
        ))  # fmt: skip
    meanings = [f"{name}: {meaning}" for name, meaning in (TRIGGERS | SCORES).items()]
    return "\n\n".join([*parts, "\n".join(meanings)])


def _title(row: dict[str, Any]) -> str:
    return f"{family(row)}: {row['threshold']:g}"


def family(row: dict[str, Any]) -> str:
    """What rows that differ in their threshold alone have in common."""
    scores = "" if row["scores"] == "units" else f", {row['scores']}"
    keep = "" if row["keep"] == 1 else f", keep {row['keep']:g}"
    return f"{row['trigger']}{scores}{keep}"


def needed_shares(
    rows: Sequence[dict[str, Any]], measure: str
) -> list[tuple[str, str, list[float | None]]]:
    """The share of steps at which each family is as good as a stride: by `LEVELS`, between its two
    nearest thresholds; None: outside what was followed.

    Args:
        measure: one of `MEASURES`.
    """
    out = []
    for case in dict.fromkeys(row["case"] for row in rows):
        these = [row for row in rows if row["case"] == case]
        levels = [
            row[measure] for stride in LEVELS for row in these
            if family(row) == "stride" and row["threshold"] == stride
        ]  # fmt: skip
        for name in dict.fromkeys(family(row) for row in these):
            points = sorted((r[measure], r["share"]) for r in these if family(r) == name)
            if len(points) > 2:
                out.append((case, name, [_between(points, level) for level in levels]))
    return out


def _between(points: Sequence[tuple[float, float]], level: float) -> float | None:
    for (low, share), (high, next_share) in pairwise(points):
        if low <= level <= high:
            part = (level - low) / (high - low) if high > low else 0.0
            return share + part * (next_share - share)
    return None


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"
