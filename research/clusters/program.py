"""`python -m research.clusters`: DynaKV's premise and parts, measured on recorded keys."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result, result_file, without_path
from penstock.models.loader import load
from research.clusters.key_stream import KeyStream, record_keys
from research.clusters.replay import Settings
from research.clusters.run import PARTS, Counter, Run
from research.clusters.table import clusters_table
from research.clusters.texts import RING_WALK, answer_of, generated, read_on

KIND = "clusters"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range.
    """
    parser = argparse.ArgumentParser(prog="python -m research.clusters", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--text", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default=RING_WALK, help="whose right answer is the output (ring_walk, long_walk,"
        " or a task of penstock bench accuracy)")  # fmt: skip
    add("--generate", action="store_true", help="the output is what the model says itself")
    add("--prompt", type=int, default=1024, help="tokens of the prompt")
    add("--output", type=int, default=2048, help="most tokens of the output")
    add("--parts", default=",".join(PARTS), help="of " + ",".join(PARTS))
    add("--cluster-tokens", type=int, default=16, help="mean size of an initial cluster")
    add("--top", type=float, default=0.1, help="share of the past that is retrieved")
    add("--buffers", default="0,1,2,4,8,16,32", help="entries that may wait for splits")
    add("--buffer-layers", type=int, default=4, help="layers that --buffers is measured in")
    add("--layout-layers", type=int, default=2, help="layers that are laid out in files")
    add("--chunk", type=int, default=512, help="tokens per forward pass")
    add("--seed", type=int, default=0)
    add(
        "--out",
        type=result_file,
        metavar="FILE",
        help="JSON file for the result, saved after each part",
    )
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    least = min(args.prompt, args.output, args.cluster_tokens, args.buffer_layers,
                args.layout_layers, args.chunk)  # fmt: skip
    if least < 1 or not 0 < args.top <= 1 or args.prompt < 2 * args.cluster_tokens:
        raise ConfigError(
            "sizes must be at least 1, --top above 0 and at most 1, and --prompt at least two "
            "clusters of --cluster-tokens"
        )
    if unknown := set(args.parts.split(",")) - set(PARTS):
        raise ConfigError(f"no part is called {min(unknown)!r}; there are {', '.join(PARTS)}")
    return args


def buffer_sizes(text: str) -> list[int]:
    """The numbers of --buffers.

    Raises:
        ConfigError: one is not a number, or negative.
    """
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--buffers takes numbers like 0,4,16, not {text!r}") from error
    if found[0] < 0:
        raise ConfigError(f"--buffers must not be negative: {text}")
    return found


def record(args: argparse.Namespace, figures: dict[str, Any]) -> KeyStream:
    """Read what the command line asks for; `figures` gets what is known of it.

    Raises:
        PenstockError: bad input.
    """
    loaded = load(args.model)
    if args.text:
        ids = read_on(loaded, args.text, prompt_tokens=args.prompt, output_tokens=args.output)
        prompt = args.prompt
    else:
        ids, prompt = answer_of(
            loaded, args.task, prompt_tokens=args.prompt, output_tokens=args.output, seed=args.seed
        )
    if args.generate:
        counter = Counter(args.output)
        ids = generated(loaded, ids[:prompt], args.output, on_token=counter.up_to("generated"))
    counter = Counter(len(ids))
    stream = record_keys(
        loaded, ids, prompt, chunk=args.chunk, on_chunk=counter.up_to("tokens read")
    )
    rows, _, dim = stream.keys[0].shape
    figures |= {
        "model": model_name(args.model), "prompt_tokens": prompt,
        "output_tokens": stream.output_tokens, "layers": list(stream.layers), "kv_heads": rows,
        "entry_bytes": 2 * dim * loaded.model.dtype.itemsize,
        "output": "generated" if args.generate else "text" if args.text else args.task,
        "expected": stream.expected,
    }  # fmt: skip
    return stream


def model_name(text: str) -> str:
    """What a model is called: the folder, or the one above it if that is just `model`."""
    path = Path(text)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    buffers = buffer_sizes(args.buffers)
    torch.manual_seed(args.seed)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "text")}
    settings["model"] = model_name(args.model)
    shown = without_path(arguments, "--text", args.text)
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    shared = Settings(cluster_tokens=args.cluster_tokens, top=args.top, seed=args.seed)
    stream = record(args, result.figures)
    runs = Run(
        stream, shared, result.figures, buffers=buffers, buffer_layers=args.buffer_layers,
        layout_layers=args.layout_layers,
    )  # fmt: skip

    def save() -> None:
        if args.out:
            result.save(args.out)

    runs.measure(args.parts.split(","), save)
    print(clusters_table(result.figures))
    if args.json:
        print(json.dumps(result.as_dict()))
    return result
