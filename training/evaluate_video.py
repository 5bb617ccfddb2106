"""Accuracy of a video reader by policy and budget: `python -m training.evaluate_video FOLDER`.

Fresh clips, one question each, asked under full attention and under every setting (as in `penstock
bench accuracy`, "kvswap@1/13:group_tokens=8"). The plain model reads a clip once; all settings get
its keys and values, read the prompt's end themselves and decode step by step, the right answer's
token given at every step. An answer is right when every token of it, `<eos>` included, was the
likeliest: greedy decoding would have said the same.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.text_table import format_table
from training.clips import TASKS, Cast
from training.evaluate import begin_result, chosen
from training.video_data import Grid
from training.video_questions import Prompt, draw_prompt

if TYPE_CHECKING:
    from penstock.evaluate.accuracy_settings import Setting
    from penstock.evaluate.result import Result
    from training.prefilled_clips import PrefilledClips

KIND = "training-video-evaluation"
SETTINGS = (
    "full,kvswap@1/13,kvswap@1/34,kvswap@1/13:group_tokens=8,kvswap@1/34:group_tokens=8,"
    "shadowkv@1/13,shadowkv@1/34,infinigen@1/13,infinigen@1/34,quest@1/13,quest@1/34,"
    "snapkv@1/13,snapkv@1/34,streaming_llm@1/13,streaming_llm@1/34"
)
_SAY_S = 3.0


@dataclass(kw_only=True)
class Cell:
    """One task at one length under one setting."""

    setting: str
    task: str
    visual_tokens: int
    side: int
    asked: int = 0
    exact: int = 0
    answer_tokens: int = 0
    right_tokens: int = 0
    seconds: float = 0.0
    """Of the prompt's end and all steps, whole batches."""
    ledger_bytes: int = 0
    full_cache_bytes: int = 0
    refused: str = ""
    """Why there is none."""

    def figures(self) -> dict[str, Any]:
        """Plain data, with the exact share's 95 % interval."""
        from penstock.evaluate.intervals import wilson

        share = wilson(self.exact, self.asked)
        return {**asdict(self), "low": round(share.low, 4), "high": round(share.high, 4)}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    from penstock.evaluate.result import result_file

    parser = argparse.ArgumentParser(prog="python -m training.evaluate_video", description=__doc__)
    add = parser.add_argument
    add("model", help="folder of a model, a run's model/")
    add("--tasks", default="all", help="names separated by commas")
    add("--tokens", default="16384,28672", help="visual tokens of the clips")
    add("--side", type=int, default=8, help="visual tokens of a frame's side")
    add("--cast", default="12x24", help="colours and shapes of the clips' world")
    add("--settings", default=SETTINGS, help="policies with budgets, separated by commas or ;")
    add("--samples", type=int, default=100, help="of each task and length")
    add("--batch", type=int, default=10, help="clips that are asked about at once")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--store", default="auto", help="where the tiers' keys and values are")
    add("--minutes", type=float, help="stop when this much time has passed")
    add("--seed", type=int, default=0)
    add("--out", type=result_file, help="file for the result (JSON), saved as it grows")
    return parser.parse_args(arguments)


def evaluate(args: argparse.Namespace, result: "Result") -> None:
    """Fill a result's figures.

    Raises:
        ConfigError: an unknown task or setting, or the model is no video reader of ours.
    """
    from penstock.evaluate.accuracy_settings import parse_settings
    from training.prefilled_clips import load_reader

    began = time.perf_counter()
    tasks, settings = chosen(args.tasks, TASKS), parse_settings([args.settings])
    cast, side = _cast(args.cast), args.side
    grids = [Grid(max(2, int(text) // side**2), side) for text in args.tokens.split(",")]
    reader = load_reader(args.model, cast, device=args.device, dtype=args.dtype)
    cells = {
        (setting.text, task, grid): Cell(
            setting=setting.text, task=task, visual_tokens=grid.visual_tokens, side=side
        )
        for grid in grids for task in tasks for setting in settings
    }  # fmt: skip

    def keep() -> None:
        result.figures = {"cells": [cell.figures() for cell in cells.values()]}
        if args.out:
            result.save(args.out)

    end = began + 60 * args.minutes if args.minutes else float("inf")
    said = time.perf_counter()
    for first in range(0, args.samples, args.batch):
        numbers = range(first, min(first + args.batch, args.samples))
        for grid in grids:
            for task in tasks:
                prompts = [draw_prompt(task, grid, cast, args.seed, n) for n in numbers]
                read = reader.read(prompts, grid)
                for setting in settings:
                    if time.perf_counter() > end:
                        keep()
                        return
                    _ask(read, prompts, setting, cells[setting.text, task, grid], args.store)
                    if time.perf_counter() - said > _SAY_S:
                        said = time.perf_counter()
                        done = f"sample {numbers[-1] + 1} of {args.samples}"
                        print(
                            f"{done}, {grid.visual_tokens:,} visual tokens, {task}, {setting.text}",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
                keep()
    keep()


def _ask(
    read: "PrefilledClips", prompts: Sequence[Prompt], setting: "Setting", cell: Cell, store: str
) -> None:
    """Let one setting answer one batch; a refused one is noted and not asked again."""
    if cell.refused:
        return
    began = time.perf_counter()
    try:
        guessed, report = read.answered(prompts, setting, store)
    except PenstockError as error:
        cell.refused = str(error)
        return
    cell.seconds += time.perf_counter() - began
    cell.ledger_bytes, cell.full_cache_bytes = report.used_bytes, report.full_cache_bytes
    for prompt, said in zip(prompts, guessed, strict=True):
        right = sum(a == b for a, b in zip(said, prompt.answer, strict=True))
        cell.asked += 1
        cell.exact += right == len(prompt.answer)
        cell.answer_tokens += len(prompt.answer)
        cell.right_tokens += right


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Exact shares with settings in rows, tasks and lengths in columns; "-" where there is none."""
    columns = list(dict.fromkeys((cell["visual_tokens"], cell["task"]) for cell in cells))
    at = {(cell["setting"], cell["visual_tokens"], cell["task"]): cell for cell in cells}
    rows = []
    for setting in dict.fromkeys(cell["setting"] for cell in cells):
        found = [at[setting, *column] for column in columns]
        shown = [f"{one['exact'] / one['asked']:.2f}" if one["asked"] else "-" for one in found]
        rows.append([setting, *shown])
    return format_table(["setting", *(f"{task} {n:,}" for n, task in columns)], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print the table, save the result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parse_arguments(words)
    names = ("tasks", "tokens", "side", "cast", "settings", "samples", "device", "dtype", "store")
    plan = {name: getattr(args, name) for name in names}
    try:
        result = begin_result(KIND, "training.evaluate_video", words, plan, args.seed)
        evaluate(args, result)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"exact match by setting, up to {args.samples} clips a cell")
    print(table(result.figures["cells"]))
    for cell in result.figures["cells"]:
        if cell["refused"]:
            print(f"{cell['setting']}, {cell['visual_tokens']:,}: {cell['refused']}")
    return 0


def _cast(text: str) -> Cast:
    try:
        colours, shapes = map(int, text.split("x"))
    except ValueError:
        raise ConfigError(f"--cast {text!r} must be COLOURSxSHAPES, such as 12x24") from None
    return Cast(colours=colours, shapes=shapes)


if __name__ == "__main__":
    sys.exit(main())
