"""`penstock search plan`: what a search would load under each strategy, before anything runs."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from penstock.cli.console import PlainConsole
from penstock.cli.devices import LateBar
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes, parse_bytes
from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.beams.beam_schedule import ScheduleOptions
from penstock.models.kv_shapes import kv_shape
from penstock.search.transfer_estimate import with_shared_blocks
from penstock.search.transfer_model import (
    CONVENTIONS,
    Convention,
    TransferRequest,
    Transfers,
    step_by_step,
    token_by_token,
)

_GIB = 2**30
_BASELINE = "token by token"
_ESTIMATES = {"+ inter-beam locality": False, "+ shared kept once": True}
"""Strategy to whether it shares."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What one strategy loads in a whole search."""

    strategy: str
    step_tokens: int | None
    """None: steps make no difference."""
    loaded_bytes: int
    most_groups: int
    """Groups of the step that had most."""
    is_estimate: bool


def search_plan_command(
    model: Annotated[
        str, typer.Option("--model", help="A known model's name, or a folder with a config.json.")
    ],
    memory: Annotated[str, typer.Option("--memory", help="Fast memory for KV, such as 7GiB.")],
    beams: Annotated[int, typer.Option("--beams", help="Candidates of a step.")] = 16,
    width: Annotated[
        int, typer.Option("--width", help="How many of them go on from one survivor.")
    ] = 2,
    step: Annotated[
        str, typer.Option("--step", help="Tokens of a step; several as in 32,64,128.")
    ] = "32",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Before the search.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens that a beam generates.")] = 1920,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float16, bfloat16, float32 (default: the model's).")
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
    seed: Annotated[int, typer.Option("--seed", help="Of the search that is simulated.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a step-wise search would load from the slow tier, strategy by strategy."""
    if convention not in CONVENTIONS:
        raise ConfigError(f"--convention {convention} is not one of {', '.join(CONVENTIONS)}")
    if not 0 <= bandwidth < float("inf"):
        raise ConfigError(f"--bandwidth {bandwidth:g} must be positive (GB/s)")
    if seed < 0:
        raise ConfigError(f"--seed {seed} must be 0 or more")
    shape = kv_shape(model, dtype or None)
    requests = [
        TransferRequest.of_shape(
            shape,
            beams=beams,
            width=width,
            step_tokens=step_tokens,
            prompt_tokens=prompt_tokens,
            new_tokens=tokens,
            memory_bytes=parse_bytes(memory),
        )
        for step_tokens in _parse_steps(step)
    ]
    [chosen] = [name for name in CONVENTIONS if name == convention]
    rows = plan_rows(requests, chosen, seed)
    if as_json:
        head = {"model": model, "seed": seed, "bandwidth_bytes_per_s": bandwidth * 1e9 or None}
        print(json.dumps(head | _as_dict(shape, requests, chosen, rows, bandwidth), indent=2))
        return
    console = PlainConsole()
    console.print(Text(_headline(model, shape, requests[0]), style="bold"))
    print_table(console, _table(rows, bandwidth))
    for note in _notes(requests, chosen, seed):
        console.print(Text(note, style="dim"))


def plan_rows(requests: list[TransferRequest], convention: Convention, seed: int) -> list[PlanRow]:
    """A row for each strategy and step length; shows progress when it takes long.

    Args:
        requests: alike but for `step_tokens`.

    Raises:
        BudgetError: fast memory does not hold one beam to the end.
    """
    rows = [_row(_BASELINE, None, token_by_token(requests[0]))]
    rows += [
        _row("group by group", request.step_tokens, step_by_step(request, convention))
        for request in requests
    ]
    with LateBar() as bar:
        parts = len(_ESTIMATES) * len(requests)
        for i, (strategy, share) in enumerate(_ESTIMATES.items()):
            for j, request in enumerate(requests):
                done = i * len(requests) + j

                def update(steps: int, of: int, done: int = done) -> None:
                    bar.update((done + steps / of) / parts, "simulating a search")

                options = ScheduleOptions(share=share)
                made = with_shared_blocks(request, options=options, seed=seed, progress=update)
                rows.append(_row(strategy, request.step_tokens, made))
    return rows


def _row(strategy: str, step_tokens: int | None, made: Transfers) -> PlanRow:
    most = int(made.groups.max(initial=1))
    return PlanRow(strategy, step_tokens, made.total_bytes, most, made.is_estimate)


def _parse_steps(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--step {text} is no number of tokens; write 32, or several: 32,64,128")
    return [int(part) for part in dict.fromkeys(parts)]


def _headline(model: str, shape: KVShape, request: TransferRequest) -> str:
    beam = request.final_tokens * request.beam_token_bytes
    return (
        f"{model}, {str(shape.dtype).removeprefix('torch.')}: {request.beams} beams (width "
        f"{request.width}) of {request.prompt_tokens:,} + {request.new_tokens:,} tokens\n"
        f"KV at the end: {format_bytes(beam)} a beam, {format_bytes(request.beams * beam)} "
        f"in all; fast memory: {format_bytes(request.memory_bytes)}"
    )


def _table(rows: list[PlanRow], bandwidth: float) -> Table:
    """Strategies down, step lengths within them."""
    table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1))
    table.add_column("strategy", no_wrap=True)
    for title in ("step", "groups", "GiB loaded", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    if bandwidth:
        table.add_column(f"at {bandwidth:g} GB/s", justify="right", no_wrap=True)
    baseline, before = rows[0].loaded_bytes, ""
    for row in rows:
        sign = "~" if row.is_estimate else ""
        cells = [
            row.strategy if row.strategy != before else "",
            "" if row.step_tokens is None else f"{row.step_tokens}",
            f"{row.most_groups}",
            sign + _figure(row.loaded_bytes / _GIB),
            sign + _percent(row.loaded_bytes / baseline) if baseline else "",
        ]
        if bandwidth:
            cells.append(f"{sign}{_figure(row.loaded_bytes / bandwidth / 1e9)} s")
        table.add_row(*cells)
        before = row.strategy
    return table


def _figure(value: float) -> str:
    """Whole numbers from 100 on, else three digits."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share >= 1e-4 or share == 0 else f"{100 * share:.4f} %"


def _notes(requests: list[TransferRequest], convention: Convention, seed: int) -> list[str]:
    """What the figures mean, and what the other conventions give."""
    figures = {
        name: " / ".join(
            _figure(step_by_step(request, name).total_bytes / _GIB) for request in requests
        )
        for name in CONVENTIONS
        if name != convention
    }
    meaning = {
        "start": "KV at the start of each step, as an engine does",
        "paper-figure": "KV at the end of each step, as the paper's Fig. 7",
        "literal": "KV at the start of every step, as the paper's Eq. 5",
    }
    others = "; ".join(f"{name}: {text} GiB" for name, text in figures.items())
    return [
        "token by token is layer-wise offloading; groups are those of the fullest step",
        f"group by group: counts {meaning[convention]}",
        f"(--convention {convention}; {others})",
        f"~ estimate: a simulated search, survivors drawn at random (seed {seed})",
    ]


def _as_dict(
    shape: KVShape,
    requests: list[TransferRequest],
    convention: Convention,
    rows: list[PlanRow],
    bandwidth: float,
) -> dict[str, Any]:
    """Everything as plain data; sizes in bytes, times in seconds."""
    baseline = rows[0].loaded_bytes
    return {
        "dtype": str(shape.dtype).removeprefix("torch."),
        "request": asdict(requests[0]) | {"step_tokens": [r.step_tokens for r in requests]},
        "convention": convention,
        "strategies": [
            asdict(row)
            | {
                "share_of_baseline": row.loaded_bytes / baseline if baseline else None,
                "seconds": row.loaded_bytes / bandwidth / 1e9 if bandwidth else None,
            }
            for row in rows
        ],
        "per_step_by_convention": {
            name: {str(r.step_tokens): step_by_step(r, name).total_bytes for r in requests}
            for name in CONVENTIONS
        },
    }
