"""`python -m research.packed_weights`: weights in 8 and 4 bits beside plain ones.

An architecture has random weights: decoding, prompts, memory while it is packed, and where a step
goes. A folder has pretrained ones: its perplexity on held-out books and code that ship, and its
bits a weight.
"""

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.tasks.real.texts import read_shipped_texts
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import encode
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM, load
from penstock.models.model_config import read_config
from penstock.models.packed.kept import kept_model
from penstock.models.packed.modules import PackedLinear
from penstock.models.packed.sources import PackedSource
from penstock.models.plain_model import ARCHITECTURES, plain_cache, random_model, vocabulary_size
from penstock.models.query_projection import decoder_layers
from research.packed_weights.breakdown import PARTS, step_parts
from research.packed_weights.loading import measure

Row = dict[str, Any]

BITS = (8, 4)
DECODE_BOUNDS = {8: 1.6, 4: 2.0}
PROMPT_BOUNDS = {8: 0.9, 4: 0.8}
PEAK_BOUND = 1.15
LOSS_BOUNDS = {8: 0.002, 4: 0.03}
_HEAD_TOKENS = 256
"""Whose logits are made at a time."""
_TEXT_STARTS = (40_000, 300_000)
"""Characters into a book and into the code."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.packed_weights", description=__doc__)
    add = parser.add_argument
    add("--model", nargs="+", default=["qwen3-0.6b"], help="architectures and folders")
    add("--layers", type=int, help="only the first layers of an architecture")
    add("--context", type=int, default=400, help="tokens that a decode step has behind it")
    add("--prompt", type=int, default=4096, help="tokens of a prompt")
    add("--chunk", type=int, default=1024)
    add("--steps", type=int, default=16, help="decoded tokens of a round")
    add("--rounds", type=int, default=3, help="of all in turn, each second one backwards")
    add("--breakdown", type=int, default=4096, help="tokens behind a step that is taken apart")
    add("--memory", default="1/13", help="of the cache of that step")
    add("--store", default="memory", help="of that cache")
    add("--text-tokens", type=int, default=2048, help="of each of four texts")
    add("--threads", type=int, help="default: torch's own choice")
    return read_options(parser, arguments, seed=False, resume=False, minutes=False)


@torch.no_grad()
def decode_s(model: Any, ids: Tensor, steps: int, *, own_cache: bool) -> float:
    """Seconds of a step behind `ids`; all is resident. [1, tokens]"""
    with ExitStack() as stack:
        room = ids.shape[1] + steps + 1
        cache: Any = (
            stack.enter_context(
                TieredCache(model, KVSwap(), memory=1.0, store="memory", max_tokens=room)
            )
            if own_cache else plain_cache(model, "dynamic", room)
        )  # fmt: skip
        past = cache_argument(model, cache)
        token = model(ids, **past, logits_to_keep=1).logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(steps):
            token = model(token, **past, logits_to_keep=1).logits[:, -1:].argmax(-1)
        return (time.perf_counter() - start) / steps


@torch.no_grad()
def prompt_s(model: Any, ids: Tensor, chunk: int) -> float:
    """Seconds of reading a prompt chunk by chunk. [1, tokens]"""
    cache = plain_cache(model, "dynamic", ids.shape[1])
    start = time.perf_counter()
    for first in range(0, ids.shape[1], chunk):
        model(ids[:, first : first + chunk], **cache_argument(model, cache), logits_to_keep=1)
    return time.perf_counter() - start


def speed_rows(name: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """Decoding, prompts and loading of an architecture."""
    most = max(args.prompt, args.breakdown, args.context)
    plain = random_model(name, max_positions=most + 64, layers=args.layers)
    plain.save_pretrained(folder / name)
    rows = [{"model": name, "bits": bits, **_loading(folder, name, bits)} for bits in BITS]
    models: dict[int, CausalLM] = {16: plain}
    models |= {bits: _packed(folder, name, bits)[0] for bits in BITS}
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary_size(plain), (1, most), generator=draw)
    took: dict[str, dict[int, list[float]]] = {
        what: {bits: [] for bits in models} for what in ("decode", "plain_cache_decode", "prompt")
    }
    for number in range(args.rounds):
        order = list(models) if number % 2 == 0 else list(models)[::-1]
        for bits in order:
            for what, own in (("decode", True), ("plain_cache_decode", False)):
                if number == 0:  # finds weights and kernels ready
                    decode_s(models[bits], ids[:, :64], 2, own_cache=own)
                step = decode_s(models[bits], ids[:, : args.context], args.steps, own_cache=own)
                took[what][bits].append(step)
        for bits in order if args.prompt else ():
            took["prompt"][bits].append(prompt_s(models[bits], ids[:, : args.prompt], args.chunk))
    for row in rows:
        for what, times in took.items():
            if times[16]:
                mine, theirs = np.array(times[row["bits"]]), np.array(times[16])
                row |= {f"{what}_s": mine.tolist(), f"bf16_{what}_s": theirs.tolist()}
                row[f"{what}_speed"] = float(np.median(theirs / mine))
        row["plain_bytes"] = sum(each.nbytes for each in plain.parameters())
    return [*rows, {"model": name, "parts_s": _parts(models, ids, args)}]


def _parts(models: dict[int, CausalLM], ids: Tensor, args: argparse.Namespace) -> Row:
    """Where a step goes, by bits, tokens and memory."""
    runs = ((ids[:, : args.context], 1.0), (ids[:, : args.breakdown], args.memory))
    return {
        str(bits): {
            f"{len(of[0])}, {memory}": step_parts(model, of, memory, args.steps, args.store)
            for of, memory in runs
        }
        for bits, model in models.items()
    }


def _loading(folder: Path, name: str, bits: int) -> Row:
    """In a process of its own, so that the memory of nothing else is in the peak."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, folder / name, bits, folder / "kept").result()


def _packed(folder: Path, name: str, bits: int) -> tuple[CausalLM, str]:
    source = PackedSource(
        folder=folder / name, config=read_config(folder / name, name), dtype="auto", bits=bits,
        own_code=False, on_bytes=lambda what, done, total: None,
    )  # fmt: skip
    return kept_model(source, folder / "kept")


def loss_rows(name: str, args: argparse.Namespace) -> list[Row]:
    """Perplexity of a pretrained model's folder, plain and packed."""
    shipped = read_shipped_texts()
    texts = {"prose": shipped.books[:2], "code": ["\n".join(shipped.code)] * 2}
    rows: list[Row] = []
    plain: Row = {}
    for bits in (16, *BITS):
        loaded = load(name, dtype="bfloat16", weights=None if bits == 16 else f"int{bits}")
        losses = {}
        for kind, of_kind in texts.items():
            each = []
            for text, start in zip(of_kind, _TEXT_STARTS, strict=True):
                ids = encode(loaded, text[start : start + 8 * args.text_tokens])
                each.append(mean_loss(loaded.model, torch.tensor([ids[: args.text_tokens]])))
            losses[kind] = float(np.mean(each))
        row = {"model": Path(name).name, "bits": bits, "loss": losses, **_sizes(loaded.model)}
        plain = plain or losses
        row["perplexity"] = {kind: math.exp(loss) for kind, loss in losses.items()}
        row["perplexity_more"] = {
            kind: math.exp(loss - plain[kind]) - 1 for kind, loss in losses.items()
        }
        rows.append(row)
        del loaded
        gc.collect()
    return rows


def _sizes(model: Any) -> Row:
    """Bytes, and bits that a weight of the layers takes, scales counted."""
    linear: list[Any] = [
        each for layer in decoder_layers(model) for each in layer.modules()
        if isinstance(each, nn.Linear | PackedLinear)
    ]  # fmt: skip
    held = sum(each.weight.nbytes for each in linear)
    count = sum(each.in_features * each.out_features for each in linear)
    eight = sum(
        each.weight.nbytes for each in linear
        if getattr(each, "forms", {}).get("weight", (0,))[0] == 8
    )  # fmt: skip
    return {
        "bytes": sum(each.nbytes for each in model.parameters()),
        "layer_bits": 8 * held / count, "eight_bit_share": eight / held,
    }  # fmt: skip


@torch.no_grad()
def mean_loss(model: Any, ids: Tensor) -> float:
    """Mean negative log-likelihood of a text's tokens behind the first, in nats. [1, tokens]"""
    hidden = model.model(ids).last_hidden_state[0, :-1]
    total = 0.0
    for first in range(0, len(hidden), _HEAD_TOKENS):
        logits = model.lm_head(hidden[first : first + _HEAD_TOKENS]).float()
        tokens = ids[0, 1 + first : 1 + first + len(logits)]
        total += float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))
    return total / (ids.shape[1] - 1)


def table(figures: Row) -> str:
    """A row for each model and number of bits."""
    cells = []
    for row in figures["rows"]:
        if "parts_s" in row:
            continue
        bits = row["bits"]
        start = [row["model"], str(bits)]
        if "perplexity" in row:
            more = row["perplexity_more"]
            holds = bits == 16 or max(more.values()) <= LOSS_BOUNDS[bits]
            said = [f"{kind} {value:.2f} ({100 * more[kind]:+.2f} %)"
                    for kind, value in row["perplexity"].items()]  # fmt: skip
            size = [f"{row['bytes'] / 2**20:.0f} MiB", f"{row['layer_bits']:.2f} bits in layers"]
            cells.append([*start, *said, *size, "holds" if holds else "MISSED"])
            continue
        decode, prompt = row["decode_speed"], row.get("prompt_speed", math.nan)
        holds = not (
            decode < DECODE_BOUNDS[bits] or prompt < PROMPT_BOUNDS[bits]
            or row["peak_ratio"] > PEAK_BOUND
        )  # fmt: skip
        cells.append([
            *start, f"decode x {decode:.2f}", f"prompt x {prompt:.2f}",
            f"{row['bytes'] / 2**20:.0f} MiB", f"peak x {row['peak_ratio']:.2f}",
            "holds" if holds else "MISSED",
        ])  # fmt: skip
    lines = [format_table(["model", "bits", "", "", "", "", ""], cells)]
    steps = [
        [row["model"], bits, where, *(f"{1000 * parts[part]:.1f}" for part in PARTS)]
        for row in figures["rows"] for bits, of in row.get("parts_s", {}).items()
        for where, parts in of.items()
    ]  # fmt: skip
    if steps:
        lines.append(format_table(["model", "bits", "tokens, memory", *PARTS], steps))
    return "\n\n".join(lines)


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, and save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "json")}
    settings["model"] = [Path(name).name for name in args.model]
    result = Result.begin("packed_weights", arguments, settings, seed=0, package="research")
    sitting = Sitting(result, args)
    rows: list[Row] = []
    figures: Row = {"threads": torch.get_num_threads(), "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model:
            is_shape = name in ARCHITECTURES
            rows += speed_rows(name, args, Path(folder)) if is_shape else loss_rows(name, args)
            sitting.keep(figures)
    return closed(result, args, table(figures))
