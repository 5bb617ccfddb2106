"""`python -m research.serving`: clients of one engine at once, and one after another.

    python -m research.serving --model FOLDER --threads 2 --reopen 16384 --resume --output FILE

asks with 1, 4, 16 and 64 clients, prompts of 1K to 16K tokens, in one budget of 512 MiB. Before it
MALLOC_ARENA_MAX=1 ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 LRU_CACHE_CAPACITY=64 let libraries keep no
more freed memory than `penstock serve` lets them.
"""

import argparse
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from penstock.core.byte_size import format_bytes, parse_bytes
from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same
from penstock.evaluate.sitting import Sitting, sit
from penstock.evaluate.text_table import format_table
from penstock.generation.engine import LLM
from penstock.generation.prompts import encode
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.request import Request
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import (
    ARCHITECTURES,
    random_adapter,
    random_model,
    vocabulary_size,
)
from research.serving.clients import at_once, one_by_one
from research.serving.llama_server import served
from research.serving.paged import paged
from research.serving.reopened import reopened
from research.verified.program import begun, text_of

Row = dict[str, Any]
BESIDE = {
    "transformers": ("paged", "transformers' continuous batching"),
    "llama.cpp": ("llama_server", "llama.cpp's server"),
}
"""What may run beside the engine: its key in a row, and its name."""
_DRAWN = 1 << 17
"""Token ids that stand for the text of a model without a tokenizer."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.serving", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder, name, or a known architecture: random weights")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    add("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384],
        help="prompts, in turn")  # fmt: skip
    add("--answer", type=int, default=128, help="tokens of each answer")
    add("--memory", default="512MiB", help="of all clients together")
    add("--policy", default="kvswap")
    add("--running", type=int, default=16, help="most clients whose requests have a cache")
    add("--chunk", type=int, default=256)
    add("--alone", type=int, default=3, help="at least so many are timed one after another")
    add("--reopen", type=int, default=0, metavar="TOKENS",
        help="also reopen a conversation of so many after a restart")  # fmt: skip
    add("--beside", choices=["transformers", "llama.cpp"],
        help="transformers' continuous batching, or llama.cpp's server, on the same prompts"
    )  # fmt: skip
    add("--llama-server", type=Path, metavar="PROGRAM")
    add("--gguf", type=Path, metavar="FILE", help="the model as llama.cpp reads it")
    add("--unfused", action="store_true", help="llama.cpp's attention, which needs a cache in f16")
    add("--weights", choices=["int8", "int4"], help="packed into so many bits")
    add("--threads", type=int, help="default: torch's own choice")
    add("--disk", default="auto")
    add("--device", default="cpu")
    add("--dtype", default="bfloat16")
    args = read_options(parser, arguments, seed=False)
    if args.beside == "llama.cpp" and None in (args.llama_server, args.gguf):
        raise ConfigError("--beside llama.cpp wants --llama-server PROGRAM and --gguf FILE")
    return args


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
    """A line for each number of clients, and one for what was reopened."""
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
    lines = [head, format_table(header, cells)]
    lines.extend(
        f"{row['clients']} clients, {what}: "
        f"{other['tokens_per_s']:.2f} tokens/s, first token {other['first_token_p50_s']:.1f} / "
        f"{other['first_token_p99_s']:.1f} s, peak {format_bytes(other['peak_bytes'])}"
        for row in figures["rows"]
        for key, what in BESIDE.values()
        if (other := row.get(key)) is not None
    )
    if (again := figures.get("reopened")) is not None:
        lines.append(
            f"reopened behind {again['reopened_cached_tokens']:,} tokens: first token in "
            f"{again['reopened_first_token_s']:.2f} s (without a restart "
            f"{again['going_on_first_token_s']:.2f} s), prefill of {again['tokens']:,} tokens "
            f"{again['prefill_first_token_s']:.1f} s: {again['times_sooner']:.0f} times; "
            f"{'the same' if again['same_answer'] else 'another'} answer"
        )
    return "\n".join(lines)


class Load:
    """Numbers of clients, and a conversation that is reopened; a `Work`."""

    def __init__(self, loaded: LoadedModel, args: argparse.Namespace) -> None:
        self._loaded, self._args = loaded, args
        if loaded.tokenizer is None:
            draw = torch.Generator().manual_seed(0)
            known = vocabulary_size(loaded.model)
            self._ids = torch.randint(known, (_DRAWN,), generator=draw).tolist()
        else:
            self._ids = encode(loaded, text_of(args.text or []), alone=False)
        self._rows: dict[int, Row] = {}
        self._reopened: Row | None = None

    def take_up(self, former: Result) -> None:
        """Keep the numbers that were measured; others are refused where settings differ."""
        mine = _settings(self._args)
        check_same(former.figures, mine, mine)
        self._rows = {row["clients"]: row for row in former.figures["rows"]}
        self._reopened = former.figures["reopened"]

    def figures(self) -> dict[str, Any]:
        """Rows in order."""
        rows = [self._rows[each] for each in sorted(self._rows)]
        return {**_settings(self._args), "rows": rows, "reopened": self._reopened}

    def report(self) -> str:
        """A table."""
        return table(self.figures())

    def run(self, sitting: Sitting) -> None:
        """Measure what is left."""
        left = [each for each in self._args.clients if each not in self._rows]
        again = self._args.reopen > 0 and self._reopened is None
        progress = Progress(len(left) + again)
        if again and not sitting.time_is_up():
            progress.say("a conversation")
            self._reopened = reopened(self._ids, self._args)
            progress.step(1)
            sitting.keep(self.figures())
        if left:
            self._at_once(left, progress, sitting)
        if self._args.beside is not None:
            self._beside(sitting)

    def _at_once(self, left: Sequence[int], progress: Progress, sitting: Sitting) -> None:
        args = self._args
        # Random weights have none that is kept, and would fit one to every prompt.
        adapter = random_adapter(self._loaded.model) if args.model in ARCHITECTURES else None
        llm = LLM(self._loaded, policy=args.policy, store=args.disk, adapter=adapter)
        with Engine(
            llm, memory=args.memory, max_running=args.running, max_waiting=max(left),
            prefill_chunk_size=args.chunk,
        ) as engine:  # fmt: skip
            warm = Request(prompt=list(self._ids[:64]), sampling=SamplingParams(max_tokens=2))
            engine.submit(warm).result()
            for clients in left:
                if sitting.time_is_up():
                    return
                progress.say(f"{clients} clients")
                self._rows[clients] = measure(engine, self._ids, clients, args)
                progress.step(1)
                sitting.keep(self.figures())

    def _beside(self, sitting: Sitting) -> None:
        args, model = self._args, self._loaded.model
        key = BESIDE[args.beside][0]
        for clients, row in self._rows.items():
            if key in row or sitting.time_is_up():
                continue
            requests = requests_of(self._ids, clients, args)
            if args.beside == "transformers":
                row[key] = paged(model, requests, args.answer)
            else:
                prompts = [list(each.prompt) for each in requests]
                row[key] = served(
                    args.llama_server, args.gguf, prompts, args.answer,
                    shape=inspect_model(model).kv, limit_bytes=parse_bytes(args.memory),
                    threads=torch.get_num_threads(), fused=not args.unfused,
                )  # fmt: skip
            sitting.keep(self.figures())


def _settings(args: argparse.Namespace) -> Row:
    """What rows of one result have in common."""
    return {
        "model": Path(args.model).name, "policy": args.policy, "dtype": args.weights or args.dtype,
        "threads": torch.get_num_threads(), "memory": args.memory, "tokens": args.tokens,
        "answer": args.answer, "running": args.running, "chunk": args.chunk,
    }  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, and save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    result = begun("serving", arguments, args)
    if args.model in ARCHITECTURES:
        positions = max(args.tokens) + args.answer
        model = random_model(args.model, max_positions=positions, device=args.device)
        loaded = LoadedModel(model=model, tokenizer=None, name=args.model)
    else:
        loaded = load(args.model, dtype=args.dtype, weights=args.weights, device=args.device)
    return sit(Sitting(result, args), Load(loaded, args), args)
