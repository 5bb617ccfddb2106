"""`penstock search plan`: what a search would load under each strategy, before anything runs."""

import json
from typing import Annotated

import typer
from rich.text import Text

from penstock.cli.console import PlainConsole
from penstock.cli.options import JsonOption, memory_option
from penstock.cli.tables import print_table
from penstock.core.byte_size import parse_bytes
from penstock.core.errors import ConfigError


def search_plan_command(
    model: Annotated[
        str, typer.Option("--model", help="A known model's name, or a folder with a config.json.")
    ],
    memory: Annotated[
        str,
        memory_option("SIZE", "Bounds the KV cache of all beams, not the weights: 7GiB."),
    ],
    beams: Annotated[int, typer.Option(help="Candidates of a step.")] = 16,
    width: Annotated[int, typer.Option(help="How many of them go on from one survivor.")] = 2,
    step: Annotated[str, typer.Option(help="Tokens of a step; several as in 32,64,128.")] = "32",
    prompt_tokens: Annotated[int, typer.Option(help="Before the search.")] = 128,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", help="Tokens that a beam generates.")
    ] = 1920,
    dtype: Annotated[
        str, typer.Option(help="float16, bfloat16, float32 (default: the model's).")
    ] = "",
    convention: Annotated[
        str,
        typer.Option(
            "--convention",
            help="How steps count: start (as an engine loads), paper-figure (as the paper's "
            "Fig. 7) or literal (as its Eq. 5).",
        ),
    ] = "start",
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", help="Of the slow tier, in GB/s; gives seconds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the search that is simulated.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say what a step-wise search would load from the slow tier, strategy by strategy."""
    from penstock.cli import search_plan_rows as screen
    from penstock.models.kv_shapes import kv_shape
    from penstock.search.transfer_model import CONVENTIONS, TransferRequest

    if convention not in CONVENTIONS:
        raise ConfigError(f"--convention {convention} is not one of {', '.join(CONVENTIONS)}")
    if not 0 <= bandwidth < float("inf"):
        raise ConfigError(f"--bandwidth {bandwidth:g} must be positive (GB/s)")
    if seed < 0:
        raise ConfigError(f"--seed {seed} must be 0 or more")
    shape = kv_shape(model, dtype or None)
    given = {
        "beams": beams, "width": width, "prompt_tokens": prompt_tokens,
        "new_tokens": max_new_tokens, "memory_bytes": parse_bytes(memory),
    }  # fmt: skip
    requests = [
        TransferRequest.of_shape(shape, step_tokens=step_tokens, **given)
        for step_tokens in screen.parse_steps(step)
    ]
    [chosen] = [name for name in CONVENTIONS if name == convention]
    rows = screen.plan_rows(requests, chosen, seed)
    if as_json:
        head = {"model": model, "seed": seed, "bandwidth_bytes_per_s": bandwidth * 1e9 or None}
        found = screen.as_plain_data(shape, requests, chosen, rows, bandwidth)
        print(json.dumps(head | found, indent=2))
        return
    console = PlainConsole()
    console.print(Text(screen.headline(model, shape, requests[0]), style="bold"))
    print_table(console, screen.plan_table(rows, bandwidth))
    for note in screen.notes(requests, chosen, seed):
        console.print(Text(note, style="dim"))
