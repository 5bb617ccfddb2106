"""Exact match of a model by task and length: `python -m training.evaluate FOLDER`.

Full attention, fresh samples, the right answer given (see `training.evaluation`). With
`--generate`, the first samples of each cell are also answered by greedy decoding through a cache
of Penstock.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.text_table import format_table
from training.ahead import default_workers
from training.asked import recall_asker
from training.data import GENERATORS

if TYPE_CHECKING:  # torch is not for the processes that make samples, which import this file again
    from penstock.evaluate.result import Result

KIND = "training-evaluation"
LONG_ANSWER = 100
"""Tokens of an answer, the mean of a cell, from which on its length is told."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    add = parser.add_argument
    add("model", help="folder of a model, or recall")
    add("--tasks", default="all", help="names separated by commas")
    add("--tokens", default="1024,2048,4096,8192,16384,32768", help="lengths of the prompts")
    add_options(parser)
    add("--generate-most", type=int, default=1200, help="longest answer that is decoded, in tokens")
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that every evaluation has."""
    from penstock.evaluate.result import result_file

    add = parser.add_argument
    add("--samples", type=int, default=100, help="of each task and length")
    add("--generate", type=int, default=0, help="samples of each cell to decode as well")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", help="of weights (default: as stored)")
    add("--minutes", type=float, help="stop when this much time has passed")
    add("--seed", type=int, default=0, help="the samples of `penstock bench accuracy --seed`")
    add("--workers", type=int, default=default_workers(), help="processes that make samples")
    add("--out", type=result_file, help="file for the result (JSON), saved as it grows")


def evaluate(args: argparse.Namespace, result: "Result") -> None:
    """Fill a result's figures.

    Raises:
        ConfigError: an unknown task, or the model has another vocabulary.
        ModelLoadError: the model cannot be loaded.
    """
    from penstock.models.loader import load
    from training.evaluation import Cell, CellRun

    began = time.perf_counter()
    tasks = chosen(args.tasks, list(GENERATORS))
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    assert loaded.tokenizer is not None
    vocabulary: dict[str, int] = loaded.tokenizer.get_vocab()
    recall_asker(vocabulary, args.seed, 0)  # refuses a vocabulary that is not the bundled one
    lengths = [int(text) for text in args.tokens.split(",")]
    cells = [Cell(task=task, tokens=tokens) for tokens in lengths for task in tasks]
    run = CellRun(loaded, cells, samples=args.samples, generate_most=args.generate_most)

    def keep() -> None:
        result.figures = {"cells": [cell.figures() for cell in run.cells]}
        if args.out:
            result.save(args.out)

    end = began + 60 * args.minutes if args.minutes else float("inf")
    given = (vocabulary, args.seed, args.generate)
    run.run(recall_asker, given, workers=args.workers, keep=keep, end=end)
    keep()


def chosen(text: str, known: Sequence[str]) -> list[str]:
    """Tasks by a text of names.

    Raises:
        ConfigError: there is none of that name.
    """
    tasks = list(known) if text == "all" else text.split(",")
    for task in tasks:
        if task not in known:
            raise ConfigError(f"no task is called {task!r}; there are {', '.join(known)}")
    return tasks


def table(cells: Sequence[dict[str, Any]], figure: str = "exact", of: str = "asked") -> str:
    """Shares with tasks in rows and lengths in columns; "-" where there is none."""
    return _table(cells, lambda cell: f"{cell[figure] / cell[of]:.2f}" if cell[of] else "-")


def answers_table(cells: Sequence[dict[str, Any]]) -> str:
    """Of tasks with long answers: the mean answer's tokens, and the share of them that comes before
    the first mistake; empty if there are none."""
    long = {c["task"] for c in cells if c["asked"] and _mean_answer(c) >= LONG_ANSWER}
    shown = [cell for cell in cells if cell["task"] in long]

    def told(cell: dict[str, Any]) -> str:
        if not cell["asked"]:
            return "-"
        leading = cell["leading_tokens"] / cell["answer_tokens"]
        return f"{_mean_answer(cell):,.0f} ({leading:.2f})"

    return _table(shown, told) if shown else ""


def report(cells: Sequence[dict[str, Any]]) -> str:
    """Both tables, the second with what it means."""
    text, long = table(cells), answers_table(cells)
    if long:
        text += (
            "\n\nmean answer in tokens, <eos> included (share of it before the first mistake), "
            f"where answers are long\n{long}"
        )
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print the tables, save the result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_evaluation(KIND, "training.evaluate", words, parse_arguments(words), evaluate)


def run_evaluation(
    kind: str, program: str, words: Sequence[str], args: argparse.Namespace,
    evaluate: "Callable[[argparse.Namespace, Result], None]", **more: Any,
) -> int:  # fmt: skip
    """Fill a result by `evaluate` and print its cells; what both evaluations do.

    Args:
        kind: of the result.
        program: the module, for the result's command.
        words: the command line.
        more: settings besides the common ones.

    Returns:
        The exit status: 0, or 2 when it cannot be done.
    """
    settings = {
        "tasks": args.tasks, "tokens": args.tokens, "samples": args.samples, "device": args.device,
        "dtype": args.dtype, "generate": args.generate, "generate_most": args.generate_most,
        **more,
    }  # fmt: skip
    try:
        result = begin_result(kind, program, words, settings, args.seed)
        evaluate(args, result)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = result.figures["cells"]
    print(f"exact match, full attention, up to {args.samples} samples a cell")
    print(report(cells))
    if args.generate:
        print(f"\n{decoded(cells)}")
    return 0


def begin_result(
    kind: str, program: str, words: Sequence[str], settings: dict[str, Any], seed: int
) -> "Result":
    """A result without figures; paths are left out of its command."""
    from datetime import UTC, datetime

    from penstock.evaluate.machine import current_commit, describe_libraries, describe_machine
    from penstock.evaluate.result import Result

    shown = " ".join("PATH" if "/" in word else word for word in words)
    return Result(
        kind=kind, command=f"python -m {program} {shown}", settings=settings, seed=seed,
        machine=describe_machine(), libraries=describe_libraries(), commit=current_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def decoded(cells: Sequence[dict[str, Any]]) -> str:
    """What greedy decoding gave, as a line and a table."""
    asked = sum(cell["generated"] for cell in cells)
    exact, right = (sum(cell[f"generated_{how}"] for cell in cells) for how in ("exact", "right"))
    tasks = {cell["task"] for cell in cells if cell["generated"]}
    shown = [cell for cell in cells if cell["task"] in tasks]
    line = (
        f"greedy decoding of {asked} samples: {exact} exact, {right} right by the task's own "
        "measure"
    )
    if not shown:
        return line
    return f"{line}, this by task and length\n{table(shown, 'generated_right', 'generated')}"


def _mean_answer(cell: dict[str, Any]) -> float:
    return float(cell["answer_tokens"] / cell["asked"])


def _table(cells: Sequence[dict[str, Any]], shown: Callable[[dict[str, Any]], str]) -> str:
    lengths = list(dict.fromkeys(cell["tokens"] for cell in cells))
    at = {(cell["task"], cell["tokens"]): cell for cell in cells}
    rows = [
        [task, *(shown(at[task, tokens]) for tokens in lengths)]
        for task in dict.fromkeys(cell["task"] for cell in cells)
    ]
    return format_table(["task", *(f"{tokens:,}" for tokens in lengths)], rows)


if __name__ == "__main__":
    sys.exit(main())
