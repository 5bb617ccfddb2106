"""Sittings in a model's card: runs that went on with each other's weights, and other seeds."""

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from training.checkpoint import sum_of
from training.evaluate import report

Record = Mapping[str, Any]
_COUNTED = ("step", "tokens", "trained_s")
_ENOUGH = 0.9
_NOT_LEARNT = 0.1


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole records of a run's log.

    Raises:
        ConfigError: it is missing or has no step.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not any(record["kind"] == "train" for record in records):
        raise ConfigError(f"{path} has no training step; train first")
    return records


def read_chain(run: Path) -> tuple[list[Path], list[list[dict[str, Any]]]]:
    """The runs that a run goes back to, the oldest first and itself last, and their logs.

    What it was begun with is looked for among the runs beside it by the sum of its weights, and so
    on; a run that was begun with something else is the first.

    Raises:
        ConfigError: a log is missing or has no step.
    """
    runs, logs = [run], [read_log(run / "log.jsonl")]
    while (wanted := _begun_with(logs[0])) is not None:
        found = _holder(wanted["sha256"], beside=run, apart_from=runs)
        if found is None:
            break
        runs.insert(0, found)
        logs.insert(0, read_log(found / "log.jsonl"))
    return runs, logs


def joined(logs: Sequence[Sequence[Record]]) -> list[Record]:
    """One log of all sittings, steps, tokens and seconds counted on."""
    records: list[Record] = []
    before = dict.fromkeys(_COUNTED, 0.0)
    for log in logs:
        records += [
            {k: v + type(v)(before[k]) if k in before else v for k, v in record.items()}
            for record in log
        ]
        last = _last(log)
        before = {name: before[name] + last[name] for name in _COUNTED}
    return records


def sittings(runs: Sequence[Path], logs: Sequence[Sequence[Record]]) -> str:
    """What was run, one sitting a line, with the sums of the weights that it left."""
    lines = []
    for number, (run, log) in enumerate(zip(runs, logs, strict=True), 1):
        begin, last = begins_of(log)[-1], _last(log)
        words = [f"python -m training.train training/configs/{begin['settings']['name']}.toml"]
        first = _begun_with(log)
        if first is not None:
            words.append(f"--from {'the model of ' + str(number - 1) if number > 1 else 'MODEL'}")
        if begin.get("fit_minutes"):
            words.append(f"--fit {begin['fit_minutes']:g}")
        words.append(f"--seed {begin['settings']['seed']}")
        lines.append(
            f"{number}. `{' '.join(words)}`: {last['step']:,} steps, {last['tokens'] / 1e6:,.1f} M "
            f"tokens, {last['trained_s'] / 60:.1f} minutes, {begins_of(log)[0]['date'][:10]}, "
            f"commit {begin['commit']}; weights `{sum_of(run / 'model')}`."
        )
    lines[:0] = [
        "Each begins with the weights that the one before it left (their SHA-256 behind).",
        "",
    ]
    return "\n".join(lines)


def other_seeds(others: Sequence[Path]) -> str:
    """What other chains came to, as tables.

    Raises:
        ConfigError: a log or an evaluation is missing.
    """
    parts = []
    for run in others:
        runs, logs = read_chain(run)
        path = run / "evaluation.json"
        if not path.is_file():
            raise ConfigError(f"{run} has no evaluation.json; run training.evaluate first")
        result = Result.load(path)
        cells = sorted(result.figures["cells"], key=itemgetter("tokens"))
        parts.append(
            f"{sittings(runs, logs)}\n\nExact match, {asked(cells)} samples a cell, seed "
            f"{result.seed}:\n\n```\n{report(cells)}\n```"
        )
    return "\n\n".join(parts)


def cannot(result: Result | None) -> str:
    """What the model was asked and does not do, by its evaluation; empty if there is nothing."""
    shares: dict[str, list[tuple[int, float]]] = {}
    for cell in [] if result is None else result.figures["cells"]:
        if cell["asked"]:
            shares.setdefault(cell["task"], []).append(
                (cell["tokens"], cell["exact"] / cell["asked"])
            )
    best = {task: max(share for _, share in seen) for task, seen in shares.items()}
    never = [task for task, share in best.items() if share < _NOT_LEARNT]
    lines = [f"* Not learnt: {', '.join(never)}."] if never else []
    for task, seen in shares.items():
        low = [f"{share:.2f} at {tokens:,}" for tokens, share in seen if share < _ENOUGH]
        if low and task not in never:
            lines.append(
                f"* {task} is right in less than {_ENOUGH:.0%} of answers: {', '.join(low)}."
            )
    return "\n".join(lines)


def asked(cells: Sequence[Mapping[str, Any]]) -> str:
    """How many samples a cell has, in words."""
    counts = sorted({cell["asked"] for cell in cells if cell["asked"]}) or [0]
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _holder(digest: str, *, beside: Path, apart_from: Sequence[Path]) -> Path | None:
    """The run whose model has these weights."""
    for run in sorted(beside.resolve().parent.iterdir()):
        known = any(run.samefile(one) for one in apart_from)
        weights = run / "model" / "model.safetensors"
        if known or not weights.is_file() or not (run / "log.jsonl").is_file():
            continue
        if sum_of(run / "model") == digest:
            return run
    return None


def begins_of(log: Sequence[Record]) -> list[Record]:
    """The records of a log that say how a sitting began."""
    return [record for record in log if record["kind"] == "begin"]


def _begun_with(log: Sequence[Record]) -> Record | None:
    found: Record | None = begins_of(log)[0].get("begun_with")
    return found


def _last(log: Sequence[Record]) -> Record:
    return [record for record in log if record["kind"] == "train"][-1]
