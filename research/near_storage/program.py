"""`python -m research.near_storage placement|agreement`: measured on a recorded decode."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.result import Result, result_file, without_path
from penstock.models.loader import LoadedModel, load
from research.clusters.key_stream import KeyStream, record_keys
from research.clusters.program import model_name
from research.clusters.run import Counter
from research.clusters.texts import answer_of, generated, read_on
from research.near_storage.agreement import measure_agreement
from research.near_storage.placement import (
    decay_settings,
    measure_placement,
    settings_of,
)
from research.near_storage.premises import measure_premises
from research.near_storage.table import agreement_table, placement_table

KIND = "near_storage"
MEASURES = ("placement", "agreement")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range.
    """
    parser = argparse.ArgumentParser(prog="python -m research.near_storage", description=__doc__)
    add = parser.add_argument
    add("measure", choices=MEASURES)
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--text", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default="two_walkers", help="whose right answer is the output")
    add("--generate", action="store_true", help="the output is what the model says itself")
    add("--prompt", type=int, default=4096, help="tokens of the prompt")
    add("--output", type=int, default=128, help="most tokens of the output")
    add("--alphas", default="0.1,0.2", help="shares of the past that a step selects")
    add("--hot", default="0.2,0.4,0.6", help="placement: shares of the past in the hot pool")
    add("--decay", default="0,8,16,32,64,128,256", help="placement: steps after which hits are"
        " halved, measured at --pool and the largest alpha")  # fmt: skip
    add("--pool", type=float, default=0.4, help="the one hot pool of agreement, and of --decay")
    add("--short", type=int, default=0, help="placement: read a prompt of so many tokens too, with"
        " half as many of output (the paper's: 128)")  # fmt: skip
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
    if min(args.prompt, args.output, args.chunk) < 1 or args.prompt < 16 or args.output < 2:
        raise ConfigError("--prompt must be at least 16, --output 2 and --chunk 1")
    if not 0 < args.pool <= 1:
        raise ConfigError("--pool is a share above 0 and at most 1")
    if args.short < 0 or 0 < args.short < 16:
        raise ConfigError("--short is 0 for none, or at least 16")
    return args


def shares(text: str, option: str) -> list[float]:
    """Numbers between 0 and 1, ascending.

    Raises:
        ConfigError: they are not.
    """
    found = sorted(real_numbers(text, option))
    if not 0 < found[0] <= found[-1] <= 1:
        raise ConfigError(f"{option} takes shares above 0 and at most 1, not {text}")
    return found


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


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    hot, alphas = shares(args.hot, "--hot"), shares(args.alphas, "--alphas")
    decays = sorted(whole_numbers(args.decay, "--decay", least=0, may_be_empty=True))
    if hot[-1] < alphas[0]:
        raise ConfigError("a hot pool must hold what a step selects: --hot is below --alphas")
    torch.manual_seed(args.seed)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "text")}
    settings["model"] = model_name(args.model)
    shown = without_path(arguments, "--text", args.text)
    result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
    result = replace(result, kind=f"{KIND}.{args.measure}")
    loaded = load(args.model)
    stream = record(loaded, args, prompt_tokens=args.prompt, output_tokens=args.output)
    heads, _, dim = stream.keys[0].shape
    result.figures |= {
        "model": settings["model"], "prompt_tokens": stream.prompt_tokens,
        "output_tokens": stream.output_tokens, "layers": list(stream.layers), "kv_heads": heads,
        "query_heads": len(stream.queries[0]), "head_dim": dim,
        "token_bytes": 2 * heads * dim * loaded.model.dtype.itemsize,
        "output": "generated" if args.generate else "text" if args.text else args.task,
        "expected": round(stream.expected, 4),
    }  # fmt: skip

    def save() -> None:
        if args.out:
            result.save(args.out)

    if args.measure == "placement":
        _placement(args, loaded, stream, result.figures, hot, alphas, decays, save)
        print(placement_table(result.figures))
    else:
        _agreement(loaded, stream, result.figures, args.pool, alphas)
        save()
        print(agreement_table(result.figures))
    if args.json:
        print(json.dumps(result.as_dict()))
    return result


def _placement(
    args: argparse.Namespace, loaded: LoadedModel, stream: KeyStream, figures: dict[str, Any],
    hot: list[float], alphas: list[float], decays: list[int], save: Callable[[], None],
) -> None:  # fmt: skip
    """Premises, rules and decay, into `figures`; saved after each."""
    token_bytes = int(figures["token_bytes"])
    figures["premises"] = measure_premises(stream)
    if args.short:
        short = record(loaded, args, prompt_tokens=args.short, output_tokens=args.short // 2)
        figures["short_premises"] = measure_premises(short)
    save()
    for name, settings in (
        ("rows", settings_of(hot, alphas)),
        ("decay", decay_settings(args.pool, alphas[-1], decays)),
    ):
        if settings:
            counter = Counter(len(stream.keys))
            figures[name] = measure_placement(
                stream, settings, token_bytes=token_bytes, on_layer=counter.up_to(f"{name}, layers")
            )
            save()


def _agreement(
    loaded: LoadedModel, stream: KeyStream, figures: dict[str, Any], hot_share: float,
    alphas: list[float],
) -> None:  # fmt: skip
    """Rules, bits and normalisers, into `figures`."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    figures["hot_share"] = hot_share
    counter = Counter(len(stream.keys))
    figures |= measure_agreement(
        stream, alphas, hot_share=hot_share, dtype=dtype,
        on_layer=counter.up_to("layers"),
    )  # fmt: skip
