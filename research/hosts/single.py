"""`python -m research.hosts.single`: what one host does with documents, in seconds and bytes.

Documents are parts of a text. Each is prefilled and stored, then opened again and asked; all
prefills, first tokens and decode steps are kept one by one, for `research.hosts` to draw from.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError, PromptError
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed, say
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import encode
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import LoadedModel, load
from research.verified.program import begun, text_of

KIND = "hosts.single"
QUESTION = "\n# What does this code do?\n"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--tokens", type=int, default=4096, help="of a document, about")
    add("--documents", type=int, default=5)
    add("--opens", type=int, default=8, help="of each document")
    add("--answer", type=int, default=16, help="tokens of each answer")
    add("--memory", default="1/10", help="of a document's caches")
    add("--threads", type=int, default=1)
    add("--disk", default="auto", help="folder of the documents")
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    if min(args.tokens, args.documents, args.opens, args.threads) < 1 or args.answer < 2:
        raise ConfigError("--answer is at least 2, and all other numbers are at least 1")
    return args


def texts_of(loaded: LoadedModel, text: str, count: int, tokens: int) -> list[str]:
    """Parts of a text, one behind the other.

    Raises:
        PromptError: the text is too short.
    """
    tokenizer: Any = loaded.tokenizer
    ids = encode(loaded, text, alone=False)
    if len(ids) < count * tokens:
        raise PromptError(f"the text has {len(ids):,} tokens; give more --text")
    return [tokenizer.decode(ids[at * tokens : (at + 1) * tokens]) for at in range(count)]


def store(loaded: LoadedModel, text: str, folder: Path, memory: str) -> dict[str, Any]:
    """Prefill a document and store it."""
    start = time.perf_counter()
    with Document.create(loaded, text, folder, memory=memory) as document:
        return {
            "tokens": document.about.tokens, "bytes": document.written_bytes,
            "prefill_s": time.perf_counter() - start,
        }  # fmt: skip


def ask(loaded: LoadedModel, folder: Path, answer: int) -> tuple[float, list[float]]:
    """Seconds from before a stored document is opened to the first token, and of each step.

    There are no steps where a piece of the answer's text is more than one token.

    Raises:
        ConfigError: the answer has no text.
    """
    told: list[float] = []
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    with Document.open(loaded, folder, settings=DocumentSettings()) as document:
        document.ask(QUESTION, params, on_text=lambda *_: told.append(time.perf_counter()))
    if not told:
        raise ConfigError("the model's answer has no text; take another --model or --text")
    steps = [after - before for before, after in pairwise(told)]
    return told[0] - start, steps if len(told) == answer else []


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    result = begun(KIND, arguments, args)
    sitting = Sitting(result, args)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        loaded = load(args.model)
        texts = texts_of(loaded, text_of(args.text or []), args.documents, args.tokens)
        place = None if args.disk == "auto" else args.disk
        figures: dict[str, Any] = {"stored": [], "first_token_s": [], "step_s": []}
        with tempfile.TemporaryDirectory(dir=place) as folder:
            for number, text in enumerate(texts):
                say(f"document {number + 1} of {len(texts)}")
                here = Path(folder) / str(number)
                figures["stored"].append(store(loaded, text, here, args.memory))
                for _ in range(args.opens):
                    first_s, steps_s = ask(loaded, here, args.answer)
                    figures["first_token_s"].append(first_s)
                    figures["step_s"] += steps_s
                sitting.keep(figures)
    finally:
        torch.set_num_threads(threads)
    return closed(result, args, single_table(figures))


def single_table(figures: dict[str, Any]) -> str:
    """Least, median and largest of each list."""
    rows = []
    for name, values in (
        ("prefilled and stored, s", [one["prefill_s"] for one in figures["stored"]]),
        ("first token of a stored one, s", figures["first_token_s"]),
        ("a step, s", figures["step_s"]),
        ("stored MB", [one["bytes"] / 1e6 for one in figures["stored"]]),
    ):
        ordered = sorted(values)
        shown = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        rows.append([name, str(len(values)), *(f"{value:.3f}" for value in shown)])
    return format_table(["one host", "samples", "least", "median", "most"], rows)


if __name__ == "__main__":
    run_program(run)
