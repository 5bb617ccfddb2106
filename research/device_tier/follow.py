"""`python -m research.device_tier.follow`: what methods fetch while a model reads real text.

What `speed` measures depends on how selections follow one another, and there they are drawn. Here
a language model goes on with a text as it was written, and each method says how often it
retrieved and how many of the units that it wanted were there already. The device tier on a CPU:
figures are counts and losses, not times.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.engine.device_tier.device_index import DeviceIndex, StepClock, Wanted
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import read_text_file
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel, load
from penstock.models.plain_model import plain_cache
from penstock.workloads.recorded_stream import Recording
from research.clusters.recording import model_name
from research.device_tier.decode_row import count
from research.device_tier.methods import Method, Pattern, method_texts, parse_method
from research.device_tier.recorded_units import recording_file
from research.device_tier.streamed_index import StreamedIndex, selecting_layers

KIND = "device_tier.follow"
METHODS = "full-dynamic,arkvale,louiskv"
_CHUNK = 1024
_WARM_UP = 8
_OUTPUT = 16_384
"""Of the pattern whose budgets and threshold a method gets: the paper's for long in and out."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--model", default="prose-1")
    add("--text", type=Path, nargs="+", required=True, help="UTF-8 files, each followed by itself")
    add("--prompt", type=int, default=8192, help="tokens of a text that are read first")
    add("--steps", type=int, default=248, help="tokens that are decoded and counted")
    add("--methods", default=METHODS, help="POLICY[:options], full-dynamic")
    add("--dtype", help="of weights and cache (default: as stored)")
    add("--on", default="cpu", choices=["cpu", "cuda"])
    add("--record", type=Path, metavar="FOLDER", help="keep what each method selected in the first "
        "text there, for device_tier.speed --recorded")  # fmt: skip
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    if min(args.prompt, args.steps) < 1:
        raise ConfigError("--prompt and --steps count from 1 on")
    return args


class SelectionTape:
    """Takes down which units every layer of a cache attends to, step by step."""

    def __init__(self, cache: TieredCache) -> None:
        """Begin; a step is recorded as it runs, without a CUDA graph."""
        self._layers = [layer for _, layer in selecting_layers(cache.tiers.layers)]
        if not self._layers:
            raise ConfigError("this method selects nothing; leave --record out")
        self._steps: list[list[Tensor]] = [[] for _ in self._layers]
        for layer, steps in zip(self._layers, self._steps, strict=True):
            assert layer.index is not None
            layer.index = _TapedIndex(layer.index, steps)

    def recording(self, context: int, steps: int, source: dict[str, Any]) -> Recording:
        """What was selected in the newest steps.

        Args:
            context: tokens before the first step.
            steps: that count.
        """
        found = torch.stack([torch.stack(one[-steps:]) for one in self._steps], dim=1)
        group = self._layers[0].setup.plan.group_tokens
        first = (found * group).double().numpy() / context
        shares = np.where(found.numpy() < 0, np.nan, first).astype(np.float32)
        return Recording(shares=shares, context=context, group_tokens=group, source=source)


class _TapedIndex(StreamedIndex):
    """A layer's index, and a list that receives its selections."""

    def __init__(self, inner: DeviceIndex, steps: list[Tensor]) -> None:
        self.inner, self.lse, self._taken = inner, inner.lse, steps

    def select(self, query: Tensor, clock: StepClock) -> Wanted:
        """See `DeviceIndex.select`."""
        wanted = self.inner.select(query, clock)
        self._taken.append(wanted.ids.masked_fill(~wanted.valid, -1).cpu())
        return wanted


class Followed:
    """One text and the model that goes on with it."""

    def __init__(self, loaded: LoadedModel, path: Path, prompt: int, steps: int) -> None:
        """Read the text.

        Raises:
            ConfigError: it cannot be read, or is too short.
        """
        assert loaded.tokenizer is not None
        text = read_text_file(path, "text")
        needed = prompt + _WARM_UP + steps + 1
        ids = loaded.tokenizer(text[: 24 * needed], add_special_tokens=False).input_ids[:needed]
        if len(ids) < needed:
            raise ConfigError(f"{path} has {len(ids):,} tokens; {needed:,} are needed")
        device = loaded.model.get_input_embeddings().weight.device
        self._model, self._ids = loaded.model, torch.tensor([ids], device=device)
        self._prompt, self._steps = prompt, steps

    def run(
        self, method: Method, progress: Callable[[int], None], record: Path | None = None
    ) -> dict[str, Any]:
        """Decode through a cache of one method.

        Args:
            progress: told every step.
            record: folder that keeps what the method selects.

        Returns:
            "loss": mean nats of a counted token; of methods that select also what `Counts.figures`
            says, with "fetched_bytes" per step.
        """
        most = self._prompt + _WARM_UP + self._steps + 1
        if method.policy is None:
            assert method.plain is not None
            cache: Any = plain_cache(self._model, method.plain, most)
            self._read(cache)
            loss, _ = self._decode(cache, progress)
            return {"loss": loss}
        cache = TieredCache(
            self._model, method.policy, store="host", max_tokens=most, cuda_graphs=record is None
        )
        with cache:
            self._read(cache)
            tape = None if record is None else SelectionTape(cache)
            loss, counts = self._decode(cache, progress)
            if record is not None and tape is not None:
                source = {"policy": method.text, "prompt_tokens": self._prompt}
                recording = tape.recording(self._prompt, self._steps, source)
                recording.save(recording_file(record, method.text))
        return {"loss": loss, **counts}

    def _read(self, cache: Any) -> None:
        for start in range(0, self._prompt, _CHUNK):
            self._forward(cache, start, min(start + _CHUNK, self._prompt))

    def _decode(self, cache: Any, progress: Callable[[int], None]) -> tuple[float, dict[str, Any]]:
        total, before = 0.0, None
        for at in range(self._prompt, self._prompt + _WARM_UP + self._steps):
            counted = at >= self._prompt + _WARM_UP
            if counted and before is None and isinstance(cache, TieredCache):
                before = count(cache)
            logits = self._forward(cache, at, at + 1)
            if counted:
                total -= float(logits.float().log_softmax(-1)[self._ids[0, at + 1]])
            progress(1)
        figures = {}
        if before is not None:
            figures = (count(cache) - before).figures(self._steps, 1)
        return total / self._steps, figures

    @torch.no_grad()
    def _forward(self, cache: Any, start: int, end: int) -> Tensor:
        model: Any = self._model
        out = model(
            input_ids=self._ids[:, start:end], **cache_argument(model, cache), use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        last: Tensor = out.logits[0, -1].cpu()
        return last


def mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of one method's texts, of what all of them have."""
    names = [
        name for name, value in rows[0].items()
        if isinstance(value, float) and all(isinstance(row.get(name), float) for row in rows)
    ]  # fmt: skip
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in names}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over texts, a line for each method."""
    lines = []
    for text in dict.fromkeys(row["method"] for row in rows):
        mean = mean_row([row for row in rows if row["method"] == text])

        def told(name: str, form: str, times: float = 1.0, mean: dict[str, Any] = mean) -> str:
            return format(mean[name] * times, form) if name in mean else ""

        lines.append([
            text, told("loss", ".4f"), told("retrieval_share", ".3f"), told("mean_segment", ".1f"),
            told("hit_rate", ".3f"), told("fetched_bytes", ",.0f", 1 / 1024),
        ])  # fmt: skip
    heads = ["method", "loss", "retrieves", "segment", "hit rate", "KiB/step"]
    return format_table(heads, lines)


def run(arguments: Sequence[str]) -> Result:
    """Follow every text by every method, print and save it."""
    args = parse_arguments(arguments)
    pattern = Pattern(args.prompt, _OUTPUT)
    methods = [parse_method(text, pattern) for text in method_texts(args.methods)]
    loaded = load(args.model, dtype=args.dtype, device=args.on)
    texts = [Followed(loaded, path, args.prompt, args.steps) for path in args.text]
    settings = {
        "model": model_name(args.model), "texts": len(texts), "prompt": args.prompt,
        "steps": args.steps, "methods": args.methods, "dtype": args.dtype, "on": args.on,
    }  # fmt: skip
    words = ["PATH" if "/" in word or Path(word) in args.text else word for word in arguments]
    result = Result.begin(KIND, words, settings, seed=0, package="research")
    rows: list[dict[str, Any]] = []
    progress = Progress(len(methods) * len(texts) * (_WARM_UP + args.steps))
    for number, text in enumerate(texts):
        for method in methods:
            progress.say(f"text {number + 1} of {len(texts)}, {method.text}")
            began = time.perf_counter()
            row = text.run(method, progress.step, None if number else args.record)
            rows.append({
                "text": number, "method": method.text, **row, "row_s": time.perf_counter() - began,
            })  # fmt: skip
            result.figures = {"rows": rows}
            if args.out:
                result.save(args.out)
    return closed(result, args, table(rows))


if __name__ == "__main__":
    run_program(run)
