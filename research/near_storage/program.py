"""`python -m research.near_storage placement|agreement`: measured on a recorded decode."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.models.loader import LoadedModel, load
from research.clusters.key_stream import KeyStream
from research.clusters.recording import add_recording_options, begin_recording, facts_of, record
from research.clusters.run import Counter
from research.near_storage.agreement import measure_agreement
from research.near_storage.placement import decay_settings, measure_placement, settings_of
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
    add_recording_options(parser, task="two_walkers", prompt=4096, output=128)
    add("--alphas", default="0.1,0.2", help="shares of the past that a step selects")
    add("--hot", default="0.2,0.4,0.6", help="placement: shares of the past in the hot pool")
    add("--decay", default="0,8,16,32,64,128,256", help="placement: steps after which hits are"
        " halved, measured at --pool and the largest alpha")  # fmt: skip
    add("--pool", type=float, default=0.4, help="the one hot pool of agreement, and of --decay")
    add("--short", type=int, default=0, help="placement: read a prompt of so many tokens too, with"
        " half as many of output (the paper's: 128)")  # fmt: skip
    args = read_options(parser, arguments, resume=False, minutes=False)
    if min(args.prompt, args.output, args.chunk) < 1 or args.prompt < 16 or args.output < 2:
        raise ConfigError("--prompt must be at least 16, --max-new-tokens 2 and --chunk 1")
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
    result = begin_recording(KIND, arguments, args)
    result = replace(result, kind=f"{KIND}.{args.measure}")
    loaded = load(args.model)
    stream = record(loaded, args, prompt_tokens=args.prompt, output_tokens=args.output)
    heads, _, dim = stream.keys[0].shape
    result.figures |= {
        **facts_of(stream, args), "query_heads": len(stream.queries[0]), "head_dim": dim,
        "token_bytes": 2 * heads * dim * loaded.model.dtype.itemsize,
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
    return closed(result, args)


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
