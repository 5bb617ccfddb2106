"""A prose model on held-out text: `python -m training.evaluate_prose FOLDER --corpus FOLDER`.

Perplexity by position and by context (see `training.perplexity`), then exact match of the bench's
English tasks with held-out prose as the haystack, under full attention, the right answer given
(see `training.evaluation`). With `--generate`, the first samples of each cell are also answered by
greedy decoding through a cache of Penstock; common_words, whose answer has no order, only so.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import ENGLISH_TASKS
from training.asked_prose import PlainTokenizer, english_asker, read_holdout
from training.data import BOS, EOS
from training.evaluate import add_options, chosen, run_evaluation

if TYPE_CHECKING:  # torch is not for the processes that make samples, which import this file again
    from penstock.evaluate.result import Result
    from penstock.models.loader import LoadedModel

KIND = "training-evaluation-prose"
_PROBE = 'It was "so", he said: 1,234 -- naïve.\n\nAnd <eos>'


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_prose", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, help="folder of a model")
    add("--corpus", type=Path, required=True, help="folder with holdout.jsonl.xz")
    add("--window", type=int, default=16_384, help="tokens of a window for the perplexity")
    add("--tasks", default="all", help="names separated by commas")
    add("--tokens", default="1024,2048,4096,8192,16384", help="lengths of the prompts")
    add_options(parser)
    add("--generate-most", type=int, default=300, help="longest answer that is decoded, in tokens")
    return parser.parse_args(arguments)


def evaluate(args: argparse.Namespace, result: "Result") -> None:
    """Fill a result's figures: "perplexity", then "cells".

    Raises:
        ConfigError: an unknown task, no corpus, or a model that cannot be asked like this.
        ModelLoadError: the model cannot be loaded.
    """
    from penstock.models.loader import load
    from training.evaluation import Cell, CellRun

    began = time.perf_counter()
    tasks = chosen(args.tasks, list(ENGLISH_TASKS))
    tokenizer, texts = PlainTokenizer(args.model), read_holdout(args.corpus)
    loaded = load(args.model, dtype=args.dtype, device=args.device)
    _check(loaded, tokenizer, args.window)

    def keep(**figures: Any) -> None:
        result.figures |= figures
        if args.out:
            result.save(args.out)

    keep(perplexity=_perplexity(loaded, tokenizer, texts, args.window), cells=[])
    print(report_perplexity(result.figures["perplexity"]), flush=True)
    lengths = [int(text) for text in args.tokens.split(",")]
    cells = [Cell(task=task, tokens=tokens) for tokens in lengths for task in tasks]
    run = CellRun(loaded, cells, samples=args.samples, generate_most=args.generate_most)
    end = began + 60 * args.minutes if args.minutes else float("inf")
    given = (args.model, args.corpus, args.seed, args.generate)

    def keep_cells() -> None:
        keep(cells=[cell.figures() for cell in run.cells])

    run.run(english_asker, given, workers=args.workers, keep=keep_cells, end=end)
    keep_cells()
    print()


def report_perplexity(figures: dict[str, Any]) -> str:
    """Both tables, with what they mean."""
    from training.perplexity import tables

    positions, contexts = tables(figures)
    return (
        f"held-out text by position: {figures['windows']} windows of {figures['window']:,} tokens "
        f"from {figures['documents']} documents, the same in all rows; +- standard error over "
        f"windows\n{positions}\n\n"
        f"the last {figures['tail']} tokens of every window, by tokens in front of them (<bos> "
        "counted in); than with all: difference to the last row, window by window\n"
        f"{contexts}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print the tables, save the result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parse_arguments(words)
    program = "training.evaluate_prose"
    return run_evaluation(KIND, program, words, args, evaluate, window=args.window)


def _perplexity(
    loaded: "LoadedModel", tokenizer: PlainTokenizer, texts: Sequence[str], window: int
) -> dict[str, Any]:
    from penstock.evaluate.progress import Progress
    from training.perplexity import byte_lengths, measure, tokens_to_read, windows_of

    assert loaded.tokenizer is not None
    counts = byte_lengths(loaded.tokenizer.get_vocab())
    windows = windows_of(texts, tokenizer.encode_text, window, counts)
    if not len(windows.ids):
        raise ConfigError(f"no held-out document has {window} tokens; give a smaller --window")
    progress = Progress(tokens_to_read(windows))
    said = time.perf_counter()

    def on_tokens(count: int) -> None:
        nonlocal said
        progress.step(count)
        if time.perf_counter() - said > 2.0:
            progress.say(f"perplexity over {len(windows.ids)} windows")
            said = time.perf_counter()

    return measure(loaded.model, windows, on_tokens)


def _check(loaded: "LoadedModel", tokenizer: PlainTokenizer, window: int) -> None:
    """Refuse what would be measured wrongly."""
    positions = int(loaded.model.config.max_position_embeddings)
    if not 2 <= window <= positions:
        raise ConfigError(f"--window {window} must be at least 2 and at most {positions}")
    theirs: Any = loaded.tokenizer
    ids = list(tokenizer.encode(_PROBE))
    if ids != list(theirs.encode(_PROBE)):
        raise ConfigError("tokenizer.json alone gives other tokens than transformers with it")
    if ids[0] != BOS or theirs.eos_token_id != EOS:
        raise ConfigError(f"the tokenizer must put <bos> ({BOS}) in front and end with {EOS}")


if __name__ == "__main__":
    sys.exit(main())
