"""plan_rows(): what a search would load under each strategy, and the words for it."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.cli.devices import LateBar
from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
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

                options = ScheduleSettings(share=share)
                made = with_shared_blocks(request, settings=options, seed=seed, progress=update)
                rows.append(_row(strategy, request.step_tokens, made))
    return rows


def _row(strategy: str, step_tokens: int | None, made: Transfers) -> PlanRow:
    most = int(made.groups.max(initial=1))
    return PlanRow(strategy, step_tokens, made.total_bytes, most, made.is_estimate)


def parse_steps(text: str) -> list[int]:
    """Step lengths, as in 32,64,128.

    Raises:
        ConfigError: it is none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--step {text} is no number of tokens; write 32, or several: 32,64,128")
    return [int(part) for part in dict.fromkeys(parts)]


def headline(model: str, shape: KVShape, request: TransferRequest) -> str:
    """What the table is about."""
    beam = request.final_tokens * request.beam_token_bytes
    return (
        f"{model}, {str(shape.dtype).removeprefix('torch.')}: {request.beams} beams (width "
        f"{request.width}) of {request.prompt_tokens:,} + {request.new_tokens:,} tokens\n"
        f"KV at the end: {format_bytes(beam)} a beam, {format_bytes(request.beams * beam)} "
        f"in all; fast memory: {format_bytes(request.memory_bytes)}"
    )


def plan_table(rows: list[PlanRow], bandwidth: float) -> Table:
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


def notes(requests: list[TransferRequest], convention: Convention, seed: int) -> list[str]:
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


def as_plain_data(
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
