"""Exact match of a model by task and length: `python -m training.evaluate FOLDER`.

Full attention, fresh samples, the right answer given (see `training.examine`). With `--generate`,
the first samples of each cell are also answered by greedy decoding through a cache of Penstock.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from penstock.bench.accuracy_settings import parse_setting
from penstock.bench.answers import answer, ask
from penstock.bench.intervals import wilson
from penstock.bench.machine import current_commit, describe_libraries, describe_machine
from penstock.bench.progress import Progress
from penstock.bench.result import Result
from penstock.bench.tasks import Sample, Words, score
from penstock.bench.text_table import format_table
from penstock.core.errors import ConfigError, PenstockError
from penstock.models.loader import LoadedModel, load
from training.data import GENERATORS
from training.examine import draw_sample, mark
from training.model import attention_backend

KIND = "training-evaluation"
_CHUNK = 4096
_SAY_S = 3.0


@dataclass(kw_only=True)
class EvaluationCell:
    """One task at one length."""

    task: str
    tokens: int
    """Most tokens of a prompt."""
    asked: int = 0
    exact: int = 0
    answer_tokens: int = 0
    right_tokens: int = 0
    generated: int = 0
    """Samples that were answered by decoding, too."""
    generated_exact: int = 0
    refused: str = ""
    """Why there is none."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    add = parser.add_argument
    add("model", help="folder of a model, or recall")
    add("--tasks", default="all", help="names separated by commas")
    add("--tokens", default="1024,2048,4096,8192,16384,32768", help="lengths of the prompts")
    add("--samples", type=int, default=100, help="of each task and length")
    add("--generate", type=int, default=0, help="samples of each cell to decode as well")
    add("--generate-most", type=int, default=1200, help="longest answer that is decoded, in tokens")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", help="of weights (default: as stored)")
    add("--minutes", type=float, help="stop when this much time has passed")
    add("--seed", type=int, default=0, help="the samples of `penstock bench accuracy --seed`")
    add("--out", help="file for the result (JSON), saved as it grows")
    return parser.parse_args(arguments)


class Evaluation:
    """All cells of an evaluation."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model.

        Raises:
            ConfigError: an unknown task, or the model has another vocabulary.
            ModelLoadError: the model cannot be loaded.
        """
        tasks = list(GENERATORS) if args.tasks == "all" else args.tasks.split(",")
        for task in tasks:
            if task not in GENERATORS:
                raise ConfigError(f"no task is called {task!r}; there are {', '.join(GENERATORS)}")
        self._args = args
        self._loaded: LoadedModel = load(args.model, dtype=args.dtype, device=args.device)
        assert self._loaded.tokenizer is not None
        self._vocabulary: dict[str, int] = self._loaded.tokenizer.get_vocab()
        self._words = Words.of(self._vocabulary)
        lengths = [int(text) for text in args.tokens.split(",")]
        self.cells = [EvaluationCell(task=t, tokens=n) for n in lengths for t in tasks]

    def run(self, result: Result) -> None:
        """Fill the cells, a sample of each in turn, so that a time limit cuts all alike."""
        args, began = self._args, time.perf_counter()
        progress = Progress(sum(cell.tokens for cell in self.cells) * args.samples)
        said = began
        for number in range(args.samples):
            for cell in self.cells:
                if args.minutes and time.perf_counter() - began > 60 * args.minutes:
                    return
                if not cell.refused:
                    self._examine(cell, number)
                progress.step(cell.tokens)
                if time.perf_counter() - said > _SAY_S:
                    progress.say(f"sample {number + 1}, {cell.tokens} tokens, {cell.task}")
                    self.keep(result)
                    said = time.perf_counter()

    def keep(self, result: Result) -> None:
        """Save what there is."""
        result.figures = {"cells": [_figures(cell) for cell in self.cells]}
        if self._args.out:
            result.save(self._args.out)

    def _examine(self, cell: EvaluationCell, number: int) -> None:
        args = self._args
        try:
            sample = draw_sample(
                cell.task, number, tokens=cell.tokens, seed=args.seed, words=self._words
            )
        except ConfigError as error:
            cell.refused = str(error)
            return
        marked = mark(self._guess, sample, self._vocabulary, args.device)
        cell.asked += 1
        cell.exact += marked.exact
        cell.answer_tokens += marked.tokens
        cell.right_tokens += marked.right_tokens
        if number < args.generate and sample.max_new_tokens <= args.generate_most:
            cell.generated += 1
            cell.generated_exact += int(score(sample, self._say(sample)))

    def _say(self, sample: Sample) -> str:
        """The model's own answer, with everything in memory."""
        question = ask(self._loaded, [sample])
        setting = parse_setting("full")
        return answer(self._loaded, question, setting, chunk=_CHUNK, shared=None).texts[0]

    def _guess(self, ids: Tensor, count: int) -> Tensor:
        model: Any = self._loaded.model
        # Every sample has a length of its own, and cuDNN plans anew for each length.
        with attention_backend("flash" if ids.is_cuda else "auto"):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits
        guessed: Tensor = logits[0, :-1].argmax(-1)
        return guessed


def table(cells: Sequence[dict[str, Any]], figure: str = "exact") -> str:
    """Exact match with tasks in rows and lengths in columns; "-" where there is none."""
    lengths = list(dict.fromkeys(cell["tokens"] for cell in cells))
    at = {(cell["task"], cell["tokens"]): cell for cell in cells}
    rows = []
    for task in dict.fromkeys(cell["task"] for cell in cells):
        row = [at[task, tokens] for tokens in lengths]
        shares = [c[figure] / c["asked"] if c["asked"] else None for c in row]
        rows.append([task, *("-" if share is None else f"{share:.2f}" for share in shares)])
    return format_table(["task", *(f"{tokens:,}" for tokens in lengths)], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print the table, save the result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parse_arguments(words)
    settings = {
        "tasks": args.tasks, "tokens": args.tokens, "samples": args.samples, "device": args.device,
        "dtype": args.dtype, "generate": args.generate, "generate_most": args.generate_most,
    }  # fmt: skip
    try:
        evaluation = Evaluation(args)
        result = Result(
            kind=KIND, command="python -m training.evaluate " + _public(words), settings=settings,
            seed=args.seed, machine=describe_machine(), libraries=describe_libraries(),
            commit=current_commit(), date=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        with torch.no_grad():
            evaluation.run(result)
        evaluation.keep(result)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = result.figures["cells"]
    print(f"exact match, full attention, up to {args.samples} samples a cell")
    print(table(cells))
    if args.generate:
        right = sum(cell["generated_exact"] for cell in cells)
        print(f"greedy decoding: {right} of {sum(c['generated'] for c in cells)} exact")
    return 0


def _figures(cell: EvaluationCell) -> dict[str, Any]:
    share = wilson(cell.exact, cell.asked)
    return {**asdict(cell), "low": round(share.low, 4), "high": round(share.high, 4)}


def _public(words: Sequence[str]) -> str:
    """The command line without paths."""
    return " ".join("PATH" if "/" in word else word for word in words)


if __name__ == "__main__":
    sys.exit(main())
