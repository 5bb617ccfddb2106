"""Decode under a hard limit: what the process had, the ledger, ten per cent, and not a byte more.

Run as a program by `penstock.evaluate.throughput --memory-cgroup`; prints one JSON object.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.core.child_python import python_command
from penstock.core.errors import ConfigError
from penstock.evaluate.decode_loop import Bench, LiveRow
from penstock.evaluate.memory_cgroup import MemoryCgroup
from penstock.evaluate.process_memory import anonymous_bytes, settle
from penstock.evaluate.throughput_rows import FLOORS, KVSWAP, all_rows
from penstock.kernels.native import compiled
from penstock.models.cache_adapter import TieredCache
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter, random_model
from penstock.workloads.synthetic_kv import SyntheticKV

SLACK = 1.10


def run_limited(arguments: Sequence[str]) -> dict[str, Any]:
    """Run this module in a process of its own; says how it ended."""
    done = subprocess.run(
        python_command(
            "penstock.evaluate.limited_decode", f"--kernels={compiled.limited_to()}", *arguments
        ),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode < 0:
        reason = f"ended by signal {-done.returncode}"
    return {"survived": False, "reason": reason}


def limited_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Build the model, note what the process holds, set the limit, then fill a cache and decode.

    Without a writable memory controller the same is measured from the process's own counters.
    """
    group, why = _join_group(args.group)
    try:
        out = _decode(args, group)
        out["how"] = "memory control group" if group is not None else f"smaps_rollup ({why})"
        return out
    finally:
        if group is not None:
            group.close()


def _join_group(where: str) -> tuple[MemoryCgroup | None, str]:
    """A control group with this process in it, or None and why not."""
    if where == "none":
        return None, "no limit was asked for"
    try:
        group = MemoryCgroup.below_own() if where == "own" else MemoryCgroup(Path(where))
    except ConfigError as error:
        return None, str(error)
    try:
        group.join()
    except ConfigError as error:
        group.close()
        return None, str(error)
    return group, ""


def _decode(args: argparse.Namespace, group: MemoryCgroup | None) -> dict[str, Any]:
    new_tokens = args.steps + 8
    model = random_model(
        args.config, max_positions=args.context + new_tokens, seed=args.seed
    )  # fmt: skip
    shape = inspect_model(model).kv
    bench = Bench(
        model=model, adapter=random_adapter(model, args.seed), batch=args.batch,
        document=SyntheticKV(shape, args.batch, torch.device("cpu"), args.seed),
        context=args.context, memory=args.memory, new_tokens=new_tokens,
    )  # fmt: skip
    rows = {row.name: row for row in all_rows(["real"])}
    LiveRow(rows[FLOORS[0]], bench, args.store).close()
    policy = rows[KVSWAP].policy
    assert policy is not None
    with TieredCache(
        model, policy, memory=args.memory, store=args.store, max_tokens=bench.max_tokens,
        batch_size=args.batch, adapter=bench.adapter,
    ) as planned:  # fmt: skip
        ledger = planned.plan.total_bytes
    settle()
    base = group.usage_bytes if group is not None else anonymous_bytes()
    limit = base + int(ledger * SLACK)
    if group is not None:
        group.limit(limit)
    row = LiveRow(rows[KVSWAP], bench, args.store)
    row.run_round(args.steps, 600.0)
    held = group.usage_bytes if group is not None else anonymous_bytes()
    out = {
        "survived": group is not None or held <= limit, "enforced": group is not None,
        "base_bytes": base, "ledger_bytes": row.cache.report().used_bytes, "limit_bytes": limit,
        "held_bytes": held, "peak_bytes": group.peak_bytes if group is not None else None,
        "page_cache_bytes": group.page_cache_bytes() if group is not None else None,
        "own_files_cached_bytes": row.file_cache_bytes, "tokens": len(row.measured.steps_s),
    }  # fmt: skip
    row.close()
    return out


def main() -> None:
    """Print the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="qwen3-0.6b")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--memory", default="1/13")
    parser.add_argument("--disk", dest="store", default="auto")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--group", default="own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", default="auto", choices=compiled.LEVELS)
    args = parser.parse_args()
    compiled.limit(args.kernels)
    print(json.dumps(limited_decode(args)))


if __name__ == "__main__":
    main()
