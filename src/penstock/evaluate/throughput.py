"""`python -m penstock.evaluate.throughput`: step times, memory and reads on a real architecture."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.devices.measure import fit_profile
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.bench_model import BenchModel, open_model
from penstock.evaluate.decode_loop import Bench
from penstock.evaluate.entry import run_program
from penstock.evaluate.limited_decode import run_limited
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.prefill_run import PrefillRow, as_figures, judge_prefill, run_prefill
from penstock.evaluate.process_memory import HOW
from penstock.evaluate.result import Result
from penstock.evaluate.sessions import Room, pack
from penstock.evaluate.sitting import closed
from penstock.evaluate.targets import Target, judge
from penstock.evaluate.throughput_rows import REAL, all_rows, chosen_rows
from penstock.evaluate.throughput_run import Pace, RowResult, new_result, run_session, say_on_stderr
from penstock.evaluate.throughput_table import (
    NOTES,
    burst_lines,
    caveat_lines,
    decode_table,
    prefill_table,
    stream_lines,
)
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES
from penstock.storage.measured_directory import measure_directory
from penstock.workloads.recorded_stream import RecordedStream, Recording
from penstock.workloads.selection_streams import PAPER_OVERLAP, OverlapStream, SelectionStream
from penstock.workloads.synthetic_kv import SyntheticKV

QUICK = {
    "context": 8192, "batch": "1", "devices": REAL, "steps": 6, "rounds": 2, "prefill_tokens": 0,
}  # fmt: skip
FULL = {
    "context": 32768, "batch": "1,4,8", "devices": "real,nvme,emmc", "steps": 10, "rounds": 4,
    "prefill_tokens": 8192,
}  # fmt: skip


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what is not given comes from `QUICK` or `FULL`."""
    program = "python -m penstock.evaluate.throughput"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one batch, 8K tokens, the real disk only")
    add(
        "--config", default="qwen3-0.6b",
        help=f"random weights of {', '.join(ARCHITECTURES)}; or a model's folder, or recall",
    )  # fmt: skip
    add("--context", type=int, help="tokens whose KV is there (default 32768)")
    add("--batch", help="batch sizes, for example 1,4,8")
    add("--memory", default="1/13", help="budget of each cache, as a share or a size")
    add("--disk", dest="store", default="auto", help="directory of the caches")
    add("--devices", help="real and presets to simulate, for example real,nvme,emmc")
    add("--steps", type=int, help="steps of a row in each round")
    add("--rounds", type=int, help="rounds; all rows take turns in each")
    add("--round-seconds", type=float, default=20.0, help="a slow row's round ends early")
    add("--rows", help="names (or beginnings) of rows, separated by semicolons or commas")
    add("--methods", help="more rows: policies with options, as in penstock bench accuracy")
    add(
        "--stream", default="own",
        help="selections of the rows with a policy: own (by its scores), overlap=SHARE of the step "
        "before (the rest by its scores), or a file of penstock bench record",
    )  # fmt: skip
    add("--prefill-tokens", type=int, help="length of the prefill rows' prompt; 0 for none")
    add("--prefill-chunks", default="1024,2048")
    add("--prefill-rounds", type=int, default=2)
    add(
        "--memory-cgroup", nargs="?", const="own", metavar="WHERE",
        help="also decode under a hard memory limit: in a control group below our own, or below "
        "the directory WHERE; none: by the process's own counters, without a limit",
    )  # fmt: skip
    add("--disk-file-mib", type=int, default=256, help="file for measuring the disk itself")
    add("--device", dest="on", default="cpu", choices=["cpu", "cuda"], help="where the model runs")
    args = read_options(
        parser, arguments, resume=False, minutes=False,
        renamed={"--store": "--disk", "--on": "--device"},
    )  # fmt: skip
    if args.memory_cgroup is not None and args.config not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"--memory-cgroup builds its own model; --config must be one of {known}")
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.batch = whole_numbers(args.batch, "--batch")
    args.prefill_chunks = whole_numbers(args.prefill_chunks, "--prefill-chunks")
    return args


def new_tokens(args: argparse.Namespace) -> int:
    """Most tokens that a decode row will decode, warm-up counted."""
    return int(args.rounds * (args.steps + 1) + 8)


def measure_disk(store: str, file_bytes: int) -> DeviceProfile:
    """The real disk as a profile."""
    say_on_stderr("measuring the disk")
    measured = measure_directory(store, file_bytes=file_bytes, seconds_per_cell=0.1)
    return fit_profile(measured.cells, name=REAL, sector_bytes=measured.sector_bytes)


def read_stream(text: str, seed: int = 0) -> SelectionStream | None:
    """Read `--stream`; None for the policies' own selections.

    Raises:
        ConfigError: no share from 0 to 1, or no recording.
    """
    if text == "own":
        return None
    name, equals, share = text.partition("=")
    if name != "overlap":
        return RecordedStream(recording=Recording.load(text))
    try:
        return OverlapStream(overlap=float(share) if equals else PAPER_OVERLAP, seed=seed)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--stream {text}: write for example overlap=0.77") from error


def run_decode(
    args: argparse.Namespace, opened: BenchModel, stream: SelectionStream | None,
    disk: DeviceProfile, keep: Callable[[list[RowResult]], None],
) -> list[RowResult]:  # fmt: skip
    """All rows at all batch sizes.

    Args:
        keep: given all rows after each batch.
    """
    model, adapter = opened.model, opened.adapter
    devices = args.devices.split(",")
    for device in devices:
        if device != REAL and device not in PRESETS:
            raise ConfigError(f"no device {device!r}; choose from {REAL}, {', '.join(PRESETS)}")
    names = None if not args.rows else _row_names(args.rows)
    methods = parse_settings([args.methods]) if args.methods else []
    if any(method.memory for method in methods):
        raise ConfigError("--methods take no budget of their own; --memory is for all rows")
    known = all_rows(devices, methods, stream)
    names = None if names is None else [*names, *(method.text for method in methods)]
    rows = chosen_rows(known, names)
    shape = inspect_model(model).kv
    pace = Pace(rounds=args.rounds, steps=args.steps, round_s=args.round_seconds)
    unit = 4 * shape.token_bytes
    too_fast = frozenset(
        name for name in devices
        if name != REAL and PRESETS[name].read_bandwidth(unit) > disk.read_bandwidth(unit)
    )  # fmt: skip
    results: list[RowResult] = []
    number = 0
    for batch in args.batch:
        sessions, refused = pack(
            rows, shape, Room.now(args.store), batch=batch, memory=args.memory,
            max_tokens=args.context + new_tokens(args), too_fast=too_fast,
        )  # fmt: skip
        document = SyntheticKV(shape, batch, torch.device(args.on), args.seed)
        bench = Bench(
            model=model, adapter=adapter, document=document, context=args.context, batch=batch,
            memory=args.memory, new_tokens=new_tokens(args),
        )  # fmt: skip
        found = []
        for session in sessions:
            number += 1
            found += run_session(session, number, bench, args.store, pace, disk, say_on_stderr)
        for row in rows:
            if row.name in refused:
                found.append(new_result(row, batch))
                found[-1].skipped = refused[row.name]
        results += found
        keep(results)
    return results


def _row_names(text: str) -> list[str]:
    """Names of rows hold commas; those are kept where a semicolon separates."""
    separator = ";" if ";" in text else ","
    if separator == "," and any(row.name == text for row in all_rows([REAL, *PRESETS])):
        return [text]
    return [name.strip() for name in text.split(separator) if name.strip()]


def without_folders(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line whose values of some options are names instead of paths."""
    shown: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in options:
            argument = f"{name}={Path(value).name}"
        elif shown and shown[-1] in options:
            argument = Path(argument).name
        shown.append(argument)
    return shown


def show(
    results: Sequence[RowResult], prefill: Sequence[PrefillRow], targets: Sequence[Target],
    limited: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Print the tables and verdicts."""
    print(decode_table(results))
    print(f"\n{NOTES}\n")
    for line in [*stream_lines(results), *burst_lines(results), *caveat_lines(results)]:
        print(line)
    if prefill:
        print(f"\n{prefill_table(prefill)}")
    if limited is not None:
        print(f"\nunder a limit of base + ledger + 10 %: {json.dumps(limited)}")
    print()
    for target in targets:
        print(target.line())


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    began = time.perf_counter()
    stream = read_stream(args.stream, args.seed)
    shown = without_folders(arguments, ("--config", "--stream"))
    result = Result.begin("throughput", shown, vars(args), seed=args.seed, store=args.store)
    private = ("out", "store", "json", "memory_cgroup")
    result.settings = {k: v for k, v in vars(args).items() if k not in private}
    result.settings["stream"] = "own" if stream is None else stream.describe()
    say_on_stderr(f"opening {args.config}")
    positions = max(args.context + new_tokens(args), args.prefill_tokens + 1)
    opened = open_model(args.config, max_positions=positions, seed=args.seed, device=args.on)
    result.settings["config"], result.settings["weights"] = opened.name, opened.weights
    disk = measure_disk(args.store, args.disk_file_mib << 20)
    prefill: list[PrefillRow] = []
    limited: dict[str, Any] | None = None

    def keep(results: Sequence[RowResult]) -> None:
        targets = [*judge(results), *judge_prefill(prefill)]
        result.figures = {
            "rows": [dataclasses.asdict(row) for row in results], "prefill": as_figures(prefill),
            "targets": [{**dataclasses.asdict(t), "passed": t.passed} for t in targets],
            "limited": limited, "memory_measured_by": HOW,
            "minutes": (time.perf_counter() - began) / 60,
            "disk": {
                "request_s": disk.request_s, "bytes_per_s": disk.bandwidth,
                "latency_s": disk.latency_s,
            },
        }  # fmt: skip
        if args.out:
            result.save(args.out)

    results = run_decode(args, opened, stream, disk, keep)
    if args.prefill_tokens:
        prefill = run_prefill(
            opened.model, opened.adapter, tokens=args.prefill_tokens, context=args.context,
            memory=args.memory, store=args.store, rounds=args.prefill_rounds, seed=args.seed,
            chunks=args.prefill_chunks, say=say_on_stderr,
        )  # fmt: skip
        keep(results)
    del opened
    if args.memory_cgroup is not None:
        say_on_stderr("decoding under a memory limit")
        names = ("config", "context", "memory", "store", "seed")
        options = [f"--{name}={getattr(args, name)}" for name in names]
        limited = run_limited([*options, f"--group={args.memory_cgroup}"])
    keep(results)
    show(results, prefill, [*judge(results), *judge_prefill(prefill)], limited)
    return closed(result, args)


if __name__ == "__main__":
    run_program(run)
