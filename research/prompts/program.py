"""`python -m research.prompts`: prompts through tiers beside DynamicCache, in pairs of one run."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.slot_plan import SlotPlan
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import encode
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import CausalLM, load
from penstock.models.plain_model import (
    ARCHITECTURES,
    plain_cache,
    random_adapter,
    random_model,
    share_weights,
    vocabulary_size,
)
from research.prompts.passes import Pass, Prompt
from research.verified.program import begun, text_of

Row = dict[str, Any]

PLAIN = "DynamicCache"
BOUND, LONG_BOUND, LONG_TOKENS = 1.05, 1.0, 12_000
"""Of the plain model's time, and from how many tokens on the second one holds."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.prompts", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name, or an architecture (random weights)")
    add("--layers", type=int, help="only the first layers of an architecture")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--tokens", type=int, nargs="+", default=[4096, 12288], help="lengths of the prompts")
    add("--batch", type=int, nargs="+", default=[1, 4], help="rows; more than one are padded")
    add("--memory", nargs="+", default=["1/4", "1/13", "1/34"])
    add("--policy", default="kvswap")
    add("--exact", action="store_true", help="exact mode, in place of the policy's selection")
    add("--rounds", type=int, default=3, help="of all ways in turn, each second one backwards")
    add("--chunk", type=int, default=1024)
    add("--threads", type=int, help="default: torch's own choice")
    add("--disk", default="auto")
    add("--device", default="cpu")
    add("--dtype", default="bfloat16")
    return read_options(parser, arguments, seed=False, resume=False, minutes=False)


def prompts_of(model: CausalLM, text: Sequence[int], args: argparse.Namespace) -> list[Prompt]:
    """A prompt of each length and batch.

    Raises:
        ConfigError: the text is too short.
    """
    found = []
    for tokens in args.tokens:
        for rows in args.batch:
            if len(text) < tokens * rows:
                raise ConfigError(
                    f"the text has {len(text):,} tokens, and {rows} rows of {tokens:,} are asked "
                    "for; give more --text"
                )
            found.append(Prompt.of(model, text[: tokens * rows], rows, args.chunk))
    return found


def measure(
    model: CausalLM, prompt: Prompt, args: argparse.Namespace, progress: Progress
) -> list[Row]:
    """Every way in turn; a row each."""
    # Random weights have none that is kept, and would fit one to every prompt.
    fits_none = args.model in ARCHITECTURES and args.policy == "kvswap"
    adapter = random_adapter(model) if fits_none else None
    plain, tiered = share_weights(model), share_weights(model)
    ways = [PLAIN, *args.memory]
    rows: dict[str, Row] = {
        way: {"what": way, "tokens": prompt.tokens, "batch": prompt.rows, "passes": []}
        for way in ways
    }
    for number in range(args.rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            row = rows[way]
            progress.say(f"{prompt.rows} x {prompt.tokens:,} tokens, {way}")
            if way == PLAIN:
                done = prompt.read(plain, plain_cache(plain, "dynamic", prompt.tokens + 1))
            elif "skipped" in row:
                progress.step(1)
                continue
            else:
                try:
                    with TieredCache(
                        tiered, args.policy, way, args.disk, max_tokens=prompt.tokens + 64,
                        batch_size=prompt.rows, exact=args.exact, prompt_tokens=prompt.tokens,
                        must_tier=True, adapter=adapter,
                    ) as cache:  # fmt: skip
                        done = prompt.read(tiered, cache)
                        row |= _memory_of(cache, cache.plan)
                except BudgetError as error:
                    row["skipped"] = str(error)
                    progress.step(1)
                    continue
            row["passes"].append(done.as_dict())
            row["logits"] = done.logits
            progress.step(1)
    return [_summed(rows[way], rows[PLAIN]) for way in ways]


def _memory_of(cache: TieredCache, plan: SlotPlan) -> Row:
    report = cache.report()
    return {
        "limit_bytes": report.limit_bytes, "peak_bytes": report.peak_bytes,
        "full_cache_bytes": report.full_cache_bytes, "slots": plan.num_slots,
        "shared_pools": plan.shared_pools, "disk": cache.tiers.simulated or "real",
    }  # fmt: skip


def _summed(row: Row, plain: Row) -> Row:
    """A row with its ratios: medians over rounds of what the round's plain pass took."""
    logits: torch.Tensor | None = row.get("logits")
    done = {key: value for key, value in row.items() if key != "logits"}
    if logits is None:
        return done
    for name in ("seconds", "cpu_s", "first_token_s", "first_token_cpu_s"):
        mine = np.array([each[name] for each in row["passes"]])
        theirs = np.array([each[name] for each in plain["passes"]])
        done[name] = float(np.median(mine))
        done[f"{name}_ratio"] = float(np.median(mine / theirs))
    if row is not plain:
        done["differs"] = float((logits - plain["logits"]).abs().max())
        bound = LONG_BOUND if row["tokens"] >= LONG_TOKENS else BOUND
        done["holds"] = bool(
            done["seconds_ratio"] <= bound and row["peak_bytes"] <= row["limit_bytes"]
        )
    return done


def table(figures: Row) -> str:
    """A row for each way."""
    cells = []
    for row in figures["rows"]:
        start = [f"{row['tokens']:,}", str(row["batch"]), row["what"]]
        if "skipped" in row:
            cells.append([*start, "too little memory", *[""] * 7])
            continue
        peak = "" if row["what"] == PLAIN else f"{row['peak_bytes'] / 2**20:.1f}"
        verdict = "" if row["what"] == PLAIN else ("holds" if row["holds"] else "MISSED")
        cells.append([
            *start, f"{row['seconds']:.2f}", f"{row['seconds_ratio']:.2f}", f"{row['cpu_s']:.2f}",
            f"{row['cpu_s_ratio']:.2f}", f"{row['first_token_s_ratio']:.2f}",
            f"{row['first_token_cpu_s_ratio']:.2f}", peak, verdict,
        ])  # fmt: skip
    header = ["tokens", "rows", "", "s", "x plain", "CPU s", "x plain", "1st token x",
              "its CPU x", "MiB peak", ""]  # fmt: skip
    head = (
        f"{figures['model']}, {figures['policy']}, chunks of {figures['chunk']:,}, "
        f"{figures['threads']} threads; at most {BOUND:g} of the plain time, {LONG_BOUND:g} from "
        f"{LONG_TOKENS:,} tokens on"
    )
    return f"{head}\n{format_table(header, cells)}"


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, and save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    result = begun("prompts", arguments, args)
    sitting = Sitting(result, args)
    most = max(args.tokens) * max(args.batch)
    if args.model in ARCHITECTURES:
        dtype = getattr(torch, args.dtype)
        model: CausalLM = random_model(
            args.model, max_positions=max(args.tokens) + 64, dtype=dtype, device=args.device,
            layers=args.layers,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary_size(model), (most,), generator=draw).tolist()
    else:
        loaded = load(args.model, dtype=args.dtype, device=args.device)
        model, ids = loaded.model, list(encode(loaded, text_of(args.text or []), alone=False))
    prompts = prompts_of(model, ids, args)
    rows: list[Row] = []
    figures: Row = {
        "model": Path(args.model).name, "policy": "exact" if args.exact else args.policy,
        "chunk": args.chunk, "threads": torch.get_num_threads(), "rows": rows,
    }  # fmt: skip
    progress = Progress(len(prompts) * args.rounds * (1 + len(args.memory)))
    warm = Pass.warm(model)
    figures["warm_s"] = warm
    for prompt in prompts:
        rows += measure(model, prompt, args, progress)
        sitting.keep(figures)
    return closed(result, args, table(figures))
