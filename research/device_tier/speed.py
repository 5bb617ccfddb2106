"""`python -m research.device_tier.speed`: end-to-end decoding in the device tier.

Source: LouisKV, section 5.3 (Figs. 6 and 7) and 5.4 (Fig. 8d).

A random model's queries point anywhere, so what selects are queries of a stated likeness
(`streamed_index`); attention uses the model's own. The prompt's keys and values, and those of the
answer up to the places where steps are measured, are synthetic and put in without a prefill.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.evaluate.text_table import format_table
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES, random_adapter, random_model
from research.device_tier.decode_row import DecodeBench, DecodeRow, take_workspaces
from research.device_tier.methods import (
    ABLATION,
    Pattern,
    method_texts,
    parse_method,
    parse_patterns,
)
from research.grid import Grid, attempt

# A line for each row, and what LouisKV gains on ArkVale -------------------------------------------

_HEADER = (
    "pattern, batch, method", "ms/step", "median", "p90", "tok/s", "graph", "retr.", "segment",
    "hits", "MiB/step", "held MiB", "ledger", "peak",
)  # fmt: skip
OURS, OTHERS = "louiskv", ("arkvale", "full-dynamic", "full-static")


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each row; "retr.": share of a layer's steps that retrieve; "held
    MiB": of the GPU, beside the weights, between steps; then what the ledger has booked, and the
    peak of filling and steps."""
    lines: list[list[str]] = []
    for row in rows:
        name = f"{row['pattern']}  {row['batch']:3d}  {row['method']}"
        why = row.get("skipped") or row.get("error")
        lines.append([name, why] if why else [name, *_cells(row)])
    notices = [
        f"{row['pattern']}, batch {row['batch']}, {row['method']}: {notice}"
        for row in rows for notice in row.get("notices", ())
    ]  # fmt: skip
    parts = [format_table(_HEADER, lines), *notices, *ratio_lines(rows), *_breakdown_lines(rows)]
    return "\n".join(part for part in parts if part)


def _cells(row: dict[str, Any]) -> list[str]:
    places, memory = row["places"], row["memory"]

    def mean(name: str) -> float | None:
        found = [place[name] for place in places if place.get(name) is not None]
        return sum(found) / len(found) if found else None

    fetched = mean("fetched_bytes")
    ledger = None if memory["ledger"] is None else memory["ledger"] / 2**20
    return [
        f"{row['answer_mean_ms']:.2f}", _number(mean("median_ms"), 2), _number(mean("p90_ms"), 2),
        f"{row['tokens_per_s']:.0f}", "yes" if row.get("graph") else "no",
        _share(mean("retrieval_share")), _number(mean("mean_segment"), 1),
        _share(mean("hit_rate")), _number(None if fetched is None else fetched / 2**20, 1),
        f"{memory['held'] / 2**20:.0f}", _number(ledger, 0),
        f"{max(memory['step_peak'], memory['fill_peak']) / 2**20:.0f}",
    ]  # fmt: skip


def ratio_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How much faster LouisKV is than each other method, by pattern and batch."""
    rates = {
        (row["pattern"], row["batch"], row["method"].partition(":")[0]): row["tokens_per_s"]
        for row in reversed(rows) if "tokens_per_s" in row and "!" not in row["method"]
    }  # fmt: skip
    lines = []
    for (pattern, batch, method), rate in rates.items():
        if method != OURS:
            continue
        said = [
            f"{rate / rates[pattern, batch, other]:.2f} times {other}"
            for other in OTHERS if (pattern, batch, other) in rates
        ]  # fmt: skip
        if said:
            lines.append(f"{pattern}, batch {batch}: {OURS} is {', '.join(said)}")
    return sorted(lines)


def _breakdown_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        found = row.get("breakdown")
        if found:
            parts = ", ".join(f"{k} {1e3 * v:.0f}" for k, v in found["layer_ms"].items())
            lines.append(
                f"{row['pattern']}, batch {row['batch']}, {row['method']}: us of a layer: {parts}; "
                f"retrieval {found['retrieval_share']:.1%}"
            )
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# End-to-end decoding in the device tier -----------------------------------------------------------

KIND = "device_tier.speed"
METHODS = "louiskv,arkvale,quest,kvswap,flexgen,full-dynamic,full-static"
_SHARED = (
    "config",
    "layers",
    "steps",
    "places",
    "segment",
    "sameness",
    "stays",
    "recorded",
    "on",
    "seed",
)
"""Settings that a result which is gone on with must have in common."""

Job = tuple[Pattern, int, str]
_STAYS_HELP = (
    "state which units are selected: these shares of a selection are in the next one, of methods "
    "that retrieve at turns and of those that do at every step (default: as the queries have it)"
)

_RECORDED_HELP = (
    "play what a language model selected by each method, which device_tier.follow --record has "
    "written there; in place of --stays"
)


def _shares(text: str) -> list[float]:
    """Read `TURN/STEP`; a list, as a saved result has."""
    try:
        turn, step = (float(word) for word in text.split("/"))
    except ValueError:
        turn = step = -1.0
    if not (0 <= turn <= 1 and 0 <= step <= 1):
        raise ConfigError(f"--stays {text} must be two shares of 0 to 1, as in 0.6/0.7")
    return [turn, step]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--config", default="llama-3.1-8b", choices=list(ARCHITECTURES))
    add("--layers", type=int, help="layers of the model (default: all)")
    add("--patterns", default="32768/512,500/16384,32768/16384", help="PROMPT/OUTPUT tokens")
    add("--batches", default="1,4,8")
    add("--methods", default=METHODS, help="POLICY[@MEMORY][:options][!FLAG...], full-...")
    add("--ablation", action="store_true", help="the methods of Fig. 8d instead")
    add("--steps", type=int, default=64, help="measured steps at each place of the answer")
    add("--places", type=int, default=3, help="of the answer, beginning and end among them")
    add("--step-seconds", type=float, default=4.0, help="fewer steps when they take this long")
    add("--breakdown", type=int, default=0, metavar="STEPS", help="time a layer's parts as well")
    add("--segment", type=int, default=8, help="steps between turns of the selecting queries")
    add("--sameness", type=float, default=0.9, help="cosine of their steps within a segment")
    add("--stays", metavar="TURN/STEP", help=_STAYS_HELP)
    add("--recorded", type=Path, metavar="FOLDER", help=_RECORDED_HELP)
    add("--host-gib", type=float, default=40.0, help="most pinned memory of a row")
    add("--on", default="cuda", choices=["cpu", "cuda"])
    args = read_options(parser, arguments)
    if min(args.steps, args.segment) < 1 or args.breakdown < 0 or not 0 <= args.sameness <= 1:
        raise ConfigError("--steps and --segment count from 1 on, and --sameness is 0 to 1")
    if args.stays is not None:
        args.stays = _shares(args.stays)
    if args.recorded is not None and args.stays is not None:
        raise ConfigError("--stays and --recorded both say what is selected; give one of them")
    if args.places < 2:
        raise ConfigError("--places must be at least 2: the answer's beginning and its end")
    if args.layers is not None and args.layers < 1:
        raise ConfigError("--layers must be at least 1")
    if args.on == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; try --on cpu")
    return args


class SpeedGrid(Grid[Job]):
    """All rows of a run, and the model that they share."""

    SHARED = _SHARED
    KEY = ("pattern", "batch", "method")
    _bench: DecodeBench

    def __init__(self, args: argparse.Namespace, settings: dict[str, Any]) -> None:
        """Read what is to be measured; the model is built by `open`."""
        self._args = args
        patterns, batches = parse_patterns(args.patterns), whole_numbers(args.batches, "--batches")
        texts = list(ABLATION) if args.ablation else method_texts(args.methods)
        self._max_tokens = max(pattern.prompt + pattern.output for pattern in patterns)
        # Rows of one pattern and batch follow on one another: they pin the same memory.
        jobs = [
            (pattern, batch, text) for pattern in patterns for batch in batches for text in texts
        ]
        for pattern, _, text in jobs:
            parse_method(text, pattern)
        super().__init__(settings, jobs)

    @override
    def keys(self, job: Job) -> list[tuple[Any, ...]]:
        return [(job[0].text, job[1], job[2])]

    @override
    def title(self, job: Job) -> str:
        return f"{job[0].text}, batch {job[1]}, {job[2]}"

    @override
    def report(self) -> str:
        return speed_table(self.rows)

    @override
    def take_up(self, former: Result) -> None:
        super().take_up(former)  # what failed is tried again, last
        there = {self.key_of(row) for row in self.rows}
        self.jobs.sort(key=lambda job: self.keys(job)[0] in there)

    @override
    def open(self) -> None:
        args, began = self._args, time.perf_counter()
        device = torch.device(args.on)
        if args.on == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        say(f"building {args.config} with random weights")
        model = random_model(
            args.config, max_positions=self._max_tokens, seed=args.seed, device=device,
            layers=args.layers,
        )  # fmt: skip
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
        take_workspaces(device, model.dtype)
        self._bench = DecodeBench(
            model=model, adapter=random_adapter(model, args.seed), shape=inspect_model(model).kv,
            device=device, steps=args.steps, places=args.places, segment=args.segment,
            sameness=args.sameness, most_s=args.step_seconds, breakdown_steps=args.breakdown,
            host_bytes=int(args.host_gib * 2**30), seed=args.seed, stays=args.stays,
            recorded=args.recorded,
        )  # fmt: skip
        say(f"built in {time.perf_counter() - began:.1f} s")

    @override
    def measure(self, job: Job, progress: Progress) -> list[dict[str, Any]]:
        pattern, batch, text = job
        row: dict[str, Any] = {"pattern": pattern.text, "batch": batch, "method": text}

        def measured() -> dict[str, Any]:
            method = parse_method(text, pattern)
            row["options"] = {} if method.policy is None else _plain(vars(method.policy))
            live = DecodeRow(self._bench, method, pattern, batch)
            try:
                return live.run()
            finally:
                row.update({k: v for k, v in live.figures.items() if k not in row})
                live.close()

        return [attempt(row, measured, self._bench.device)]


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if isinstance(v, bool | int | float | str)}


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    private = ("out", "json", "resume", "minutes")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings["recorded"] = None if args.recorded is None else args.recorded.name
    grid = SpeedGrid(args, settings)
    shown = without_path(arguments, "--recorded", str(args.recorded))
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    return sit(Sitting(result, args), grid, args)


if __name__ == "__main__":
    run_program(run)
