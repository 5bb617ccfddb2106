"""`python -m research.statistics`: where full attention looks; beside it the papers' premises."""

import argparse
import textwrap
from collections.abc import Sequence

from penstock.evaluate.audit.program import (
    Paced,
    begin,
    headline,
    left_out_lines,
    open_prompts,
    read_prompt_options,
)
from penstock.evaluate.audit.reference import end_token_ids
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.models.model_shape import inspect_model
from research.statistics.capture import full_attention_steps
from research.statistics.premises import premises
from research.statistics.run import Statistics, measure
from research.statistics.table import keys_table, legends, locality_table


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number is out of its range, or --out cannot be a file.
    """
    parser = argparse.ArgumentParser(prog="python -m research.statistics", description=__doc__)
    return read_prompt_options(parser, arguments)


def run(arguments: Sequence[str]) -> Result:
    """Measure full attention alone, print the tables and save the result.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    result = begin("statistics", arguments, args, policies=[], package="research")
    loaded, prompt, following = open_prompts(args)
    shape = inspect_model(loaded.model)
    reading, decoding = Paced(prompt.padded_tokens), Paced(args.new_tokens)
    ranking = Paced(len(shape.tiered_layers))
    reading.start("full attention reads the prompt")

    def on_prefill(done: int) -> None:
        reading.reach(done)
        if done == prompt.padded_tokens:
            decoding.start("full attention decodes")

    def on_layer(done: int) -> None:
        if done == 0:
            ranking.start("rank and drift of keys, layer by layer")
        ranking.reach(done)

    steps = full_attention_steps(
        loaded, prompt, new_tokens=args.new_tokens, chunk=args.chunk,
        ends=frozenset() if args.past_end else end_token_ids(loaded), following=following,
        on_prefill=on_prefill,
    )  # fmt: skip
    statistics = Statistics(shape.kv, prompt, top=args.top, new_tokens=args.new_tokens)
    result.figures = {
        "prompt_tokens": [len(ids) for ids in prompt.token_ids],
        "layers": list(shape.tiered_layers), "left_out_layers": sorted(shape.windows),
        **measure(statistics, steps, on_step=decoding.reach, on_layer=on_layer),
    }  # fmt: skip
    if args.out:
        result.save(args.out)
    print(report(result))
    return closed(result, args)


def report(result: Result) -> str:
    """The tables of a "statistics" result, and the papers' premises beside its figures."""
    figures = result.figures
    locality, keys = (textwrap.fill(text, 100) for text in legends(figures))
    lines = [textwrap.fill(line, 100, subsequent_indent="  ") for line in premises(figures)]
    return "\n".join(
        [
            headline(result), "", locality_table(figures), "", locality, "", keys_table(figures),
            "", keys, "", *lines, *left_out_lines(figures),
        ]
    )  # fmt: skip
