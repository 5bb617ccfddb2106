"""`python -m research.answers`: the KL along full attention's own answers, setting by setting.

The tasks are those of suite real. Every setting is fed the answer that full attention gave, so that
all tokens of an answer count, where a score has one number an answer: far fewer samples tell two
settings apart.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import BudgetError, ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_fidelity import read_passages
from penstock.evaluate.accuracy_settings import Setting, parse_settings
from penstock.evaluate.answers import ask
from penstock.evaluate.audit.reference import Reference, end_token_ids, make_reference
from penstock.evaluate.audit.run import follow
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.tasks.real.passages import FIDELITY
from penstock.evaluate.tasks.real.registry import RealTasks
from penstock.evaluate.text_table import format_table
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model

Row = dict[str, Any]
_LOOK_EVERY, _TOP = 32, 64
_TASKS = "extraction,long_answer,multi_query,fidelity_prose"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.answers", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder or name of a model with a chat template")
    add("--tasks", default=_TASKS, help="of suite real, separated by commas")
    add("--tokens", type=int, default=8192, help="length of a prompt")
    add("--samples", type=int, default=24, help="of each task, decoded as one batch")
    add("--steps", type=int, default=256, help="most tokens of an answer")
    add(
        "--settings",
        required=True,
        help="POLICY@BUDGET:option=value,...;...; ratios are to the first",
    )
    add("--device", default="cpu")
    add("--dtype")
    add("--chunk", type=int, default=2048)
    add("--disk", default="memory")
    return read_options(parser, arguments, resume=False, minutes=False)


def reference_of(
    loaded: LoadedModel, source: RealTasks, task: str, args: argparse.Namespace,
    progress: Progress,
) -> Reference:  # fmt: skip
    """What full attention answers to the samples of a task, and its distributions.

    Raises:
        ConfigError: no task is called so.
    """

    def tell(tokens: int) -> None:
        progress.say(f"{task}: full attention, {tokens:,} tokens read")

    drawn: dict[str, Any] = {"tokens": args.tokens, "seed": args.seed}
    if task in FIDELITY:
        rows = source.passages(task, 0, args.samples, **drawn)
        return read_passages(loaded, rows, chunk=args.chunk, on_tokens=tell)
    question = ask(loaded, source.draw(task, 0, args.samples, **drawn))
    return make_reference(
        loaded, question.batch, new_tokens=min(args.steps, question.new_tokens), chunk=args.chunk,
        ends=end_token_ids(loaded), look_every=_LOOK_EVERY, on_prefill=tell,
    )  # fmt: skip


def measure(
    loaded: LoadedModel, reference: Reference, setting: Setting, args: argparse.Namespace
) -> Row:
    """Figures of one setting; lists are by sample."""
    try:
        done = follow(loaded.model, setting, reference, top=_TOP, store=args.disk)
    except BudgetError as error:
        return {"refused": str(error)}
    return {
        "kl": done.row_kl, "same": done.row_same, "mass": done.mass, "hits": done.hit_rate,
        "read_bytes": done.read_bytes / args.samples, "memory_bytes": done.ledger_bytes,
        "full_cache_bytes": done.full_cache_bytes,
    }  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """A line for each task and setting: the KL, and the mean of its ratios to the first one."""
    cells: list[list[str]] = []
    first: dict[str, Any] = {}
    for row in rows:
        if "refused" in row:
            cells.append([row["task"], row["setting"], "refused", *4 * [""]])
            continue
        kl = np.array(row["kl"])
        base = first.setdefault(row["task"], kl)
        ratio = np.exp(np.log((kl + 1e-6) / (base + 1e-6)).mean())
        hits = "" if row["hits"] is None else f"{row['hits']:.2f}"
        cells.append([
            row["task"], row["setting"], f"{kl.mean():.4f}", f"{ratio:.2f}",
            f"{np.mean(row['same']):.3f}", f"{np.mean(row['mass']):.3f}", hits,
        ])  # fmt: skip
    return format_table(["task", "setting", "KL", "to first", "same", "attention", "hits"], cells)


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, and save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    settings = parse_settings([args.settings])
    kept = {name: value for name, value in vars(args).items() if name not in ("out", "json")}
    kept["model"] = Path(args.model).name
    if args.disk not in ("auto", "memory", *PRESETS):
        kept["disk"] = "folder"
    result = Result.begin(
        "answers", arguments, kept, seed=args.seed, store=args.disk, package="research"
    )
    sitting = Sitting(result, args)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    if loaded.tokenizer is None:
        raise ConfigError(f"{args.model} has no tokenizer")
    source = RealTasks(loaded.tokenizer, positions=inspect_model(loaded.model).max_positions)
    rows: list[Row] = []
    tasks = args.tasks.split(",")
    progress = Progress(len(tasks) * len(settings))
    for task in tasks:
        reference = reference_of(loaded, source, task, args, progress)
        for setting in settings:
            progress.say(f"{task}: {setting.text}")
            rows.append({"task": task, "setting": setting.text})
            rows[-1] |= measure(loaded, reference, setting, args)
            progress.add("settings", 1)
            sitting.keep({"rows": rows})
    return closed(result, args, table(rows))
