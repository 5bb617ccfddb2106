"""`python -m research.serving`: clients of one engine at once, and one after another."""

import argparse
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.text_table import format_table
from penstock.generation.engine import LLM
from penstock.generation.prompts import encode
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.request import Request
from penstock.models.loader import load
from research.serving.clients import at_once, one_by_one
from research.verified.program import begun, text_of

Row = dict[str, Any]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.serving", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    add("--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="prompts, in turn")
    add("--answer", type=int, default=128, help="tokens of each answer")
    add("--memory", default="512MiB", help="of all clients together")
    add("--policy", default="kvswap")
    add("--running", type=int, default=16, help="most clients whose requests have a cache")
    add("--chunk", type=int, default=256)
    add("--alone", type=int, default=3, help="at least so many are timed one after another")
    add("--threads", type=int, help="default: torch's own choice")
    add("--disk", default="auto")
    add("--device", default="cpu")
    add("--dtype", default="bfloat16")
    return read_options(parser, arguments, seed=False, resume=False, minutes=False)


def requests_of(ids: Sequence[int], count: int, args: argparse.Namespace) -> list[Request]:
    """Prompts from different places of a text, their lengths in turn.

    Raises:
        ConfigError: the text is too short.
    """
    most = max(args.tokens)
    if len(ids) < most + count:
        raise ConfigError(f"the text has {len(ids):,} tokens; give more --text")
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    step = (len(ids) - most) // count
    lengths = cycle(args.tokens)
    return [
        Request(prompt=list(ids[at : at + next(lengths)]), sampling=params)
        for at in range(0, step * count, step)
    ]


def measure(engine: Engine, ids: Sequence[int], clients: int, args: argparse.Namespace) -> Row:
    """One number of clients, both ways.

    Some of them are timed one after another, and stand for all: lengths come in turn.
    """
    requests = requests_of(ids, clients, args)
    few = min(clients, -(-args.alone // len(args.tokens)) * len(args.tokens))
    alone = one_by_one(engine, requests[:few])
    together = at_once(engine, requests)
    same = [one == other for one, other in zip(alone["answers"], together["answers"], strict=False)]
    for each in (alone, together):
        del each["answers"]
    # Of each length the same share of both, or the ratio would be of other work.
    weights = [requests[number].prompt for number in range(few)]
    per_token = alone["seconds"] / sum(len(each) + args.answer for each in weights)
    work = sum(len(each.prompt) + args.answer for each in requests)
    return {
        "clients": clients, "alone_clients": few, "alone": alone, "together": together,
        "ratio": per_token * work / together["seconds"], "same_answers": sum(same),
    }  # fmt: skip


def table(figures: Row) -> str:
    """A line for each number of clients."""
    cells = []
    for row in figures["rows"]:
        alone, both = row["alone"], row["together"]
        cells.append([
            f"{row['clients']}", f"{both['tokens_per_s']:.2f}", f"{row['ratio']:.2f}",
            f"{both['rows_per_step']:.1f}",
            f"{both['first_token_p50_s']:.1f} / {both['first_token_p99_s']:.1f}",
            f"{1e3 * both['between_p50_s']:.0f} / {1e3 * both['between_p99_s']:.0f}",
            f"{1e3 * alone['between_p50_s']:.0f}", f"{both['longest_silence_s']:.1f}",
            format_bytes(both["promised_bytes"]), format_bytes(both["process_growth_bytes"]),
            f"{row['same_answers']}/{row['alone_clients']}",
        ])  # fmt: skip
    header = [
        "clients", "tokens/s", "x alone", "rows", "1st token s, p50 / p99",
        "between ms, p50 / p99", "alone ms", "silence s", "promised", "process +", "same",
    ]  # fmt: skip
    head = (
        f"{figures['model']}, {figures['policy']}, {figures['dtype']}, {figures['threads']} "
        f"threads, {figures['memory']} for all, prompts of {figures['tokens']}, answers of "
        f"{figures['answer']}"
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
    result = begun("serving", arguments, args)
    sitting = Sitting(result, args)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    ids = encode(loaded, text_of(args.text or []), alone=False)
    rows: list[Row] = []
    figures: Row = {
        "model": Path(args.model).name, "policy": args.policy, "dtype": args.dtype,
        "threads": torch.get_num_threads(), "memory": args.memory, "tokens": args.tokens,
        "answer": args.answer, "running": args.running, "chunk": args.chunk, "rows": rows,
    }  # fmt: skip
    progress = Progress(len(args.clients))
    llm = LLM(loaded, policy=args.policy, store=args.disk)
    with Engine(
        llm, memory=args.memory, max_running=args.running, max_waiting=max(args.clients),
        prefill_chunk_size=args.chunk,
    ) as engine:  # fmt: skip
        warm = Request(prompt=list(ids[:64]), sampling=SamplingParams(max_tokens=2))
        engine.submit(warm).result()
        for clients in args.clients:
            progress.say(f"{clients} clients")
            rows.append(measure(engine, ids, clients, args))
            progress.step(1)
            sitting.keep(figures)
    return closed(result, args, table(figures))
