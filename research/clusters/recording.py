"""A model's keys and queries on one text: what programs record, the options and facts of it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.evaluate.result import Result, without_path
from penstock.models.loader import LoadedModel
from research.clusters.key_stream import KeyStream, record_keys
from research.clusters.run import Counter
from research.clusters.texts import answer_of, generated, read_on


def add_recording_options(
    parser: argparse.ArgumentParser, *, task: str, prompt: int, output: int
) -> None:
    """Options of the model and of the text.

    Args:
        task, prompt, output: what is read if the command line names nothing else.
    """
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--text", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default=task, help="whose right answer is the output (ring_walk, long_walk,"
        " or a task of penstock bench accuracy)")  # fmt: skip
    add("--generate", action="store_true", help="the output is what the model says itself")
    add("--prompt", type=int, default=prompt, help="tokens of the prompt")
    add("--max-new-tokens", dest="output", type=int, default=output,
        help="most tokens of the output")  # fmt: skip
    add("--chunk", type=int, default=512, help="tokens per forward pass")


def begin_recording(kind: str, arguments: Sequence[str], args: argparse.Namespace) -> Result:
    """The result of a program that records; it does not show the text's path."""
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "text")}
    settings["model"] = model_name(args.model)
    shown = without_path(arguments, "--text", args.text)
    return Result.begin(kind, shown, settings, seed=args.seed, package="research")


def record(
    loaded: LoadedModel, args: argparse.Namespace, *, prompt_tokens: int, output_tokens: int
) -> KeyStream:  # fmt: skip
    """Read what the command line asks for.

    Raises:
        PenstockError: bad input.
    """
    if args.text:
        prompt = prompt_tokens
        ids = read_on(loaded, args.text, prompt_tokens=prompt, output_tokens=output_tokens)
    else:
        ids, prompt = answer_of(
            loaded, args.task, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
            seed=args.seed,
        )  # fmt: skip
    if args.generate:
        said = Counter(output_tokens)
        ids = generated(loaded, ids[:prompt], output_tokens, on_token=said.up_to("generated"))
    counter = Counter(len(ids))
    return record_keys(loaded, ids, prompt, chunk=args.chunk, on_chunk=counter.up_to("tokens read"))


def facts_of(stream: KeyStream, args: argparse.Namespace) -> dict[str, Any]:
    """What was recorded, for the result."""
    return {
        "model": model_name(args.model), "prompt_tokens": stream.prompt_tokens,
        "output_tokens": stream.output_tokens, "layers": list(stream.layers),
        "kv_heads": stream.keys[0].shape[0],
        "output": "generated" if args.generate else "text" if args.text else args.task,
        "expected": stream.expected,
    }  # fmt: skip


def model_name(text: str) -> str:
    """What a model is called: the folder, or the one above it if that is just `model`."""
    path = Path(text)
    return path.parent.name if path.name == "model" and path.parent.name else path.name
