"""`penstock plan`: what to expect of a model on a machine that need not be present."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from penstock.cli.console import PlainConsole
from penstock.cli.options import JsonOption, WeightsOption, memory_option
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes
from penstock.core.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from penstock.tuner.cost_model import Prediction, Workload
    from penstock.tuner.hardware import Hardware

_GROUP_TOKENS = {"emmc": 8}
"""KVSwap's group by disk (section 5.1: 8 on eMMC, 4 on NVMe)."""
_DEFAULT_GROUP_TOKENS = 4


def plan_command(
    model: Annotated[
        str, typer.Option("--model", help="A known model's name, or a folder with a config.json.")
    ],
    machine: Annotated[str, typer.Option("--hardware", help="Such as orin-agx or rtx-4090.")],
    disk: Annotated[
        str, typer.Option(metavar="nvme|ufs|emmc", help="Where the KV cache would lie.")
    ] = "nvme",
    context: Annotated[int, typer.Option("--context", help="Tokens of a sequence.")] = 32768,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at once.")] = 1,
    memory: Annotated[
        str,
        memory_option(
            "SIZE|SHARE|auto",
            "Bounds the KV cache, not the weights: 2GiB, or 1/13 of the full cache.",
        ),
    ] = "1/13",
    policy: Annotated[
        str, typer.Option("--policy", help="One policy (default: all that can be predicted).")
    ] = "",
    group: Annotated[
        int, typer.Option("--group", help="KVSwap's G (default: 8 on emmc, 4 elsewhere).")
    ] = 0,
    reuse: Annotated[
        float | None,
        typer.Option(
            "--reuse",
            help="Share of a selection that was there a step before (default: KVSwap's paper's).",
        ),
    ] = None,
    weights: WeightsOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Predict speed and memory on a machine that is not here."""
    from penstock.devices.presets import PRESETS
    from penstock.tuner.advice import advise, fastest
    from penstock.tuner.cost_model import Workload, check_weights, limit_of
    from penstock.tuner.hardware import hardware
    from penstock.tuner.model_sizes import model_sizes
    from penstock.tuner.step_work import PAPER_REUSE_RATE, PREDICTABLE

    if disk not in PRESETS:
        raise ConfigError(f"--disk {disk} is not known; choose from {', '.join(PRESETS)}")
    _check_counts(group, context, batch)
    sizes = replace(model_sizes(model), bits=None if weights is None else weights.bits)
    where = hardware(machine)
    full = sizes.shape.full_cache_bytes(batch, context)
    free = max(0, where.memory_bytes - sizes.weight_bytes)
    load = Workload(
        model=sizes, hardware=where, disk=PRESETS[disk], context=context, batch=batch,
        limit_bytes=limit_of(memory, full, free, batch * sizes.beside.state_bytes),
        reuse_rate=PAPER_REUSE_RATE if reuse is None else reuse,
    )  # fmt: skip
    check_weights(load)
    names = [policy] if policy else list(PREDICTABLE)
    made, refused = predictions(load, names, group or _GROUP_TOKENS.get(disk))
    sentences = advise(fastest(made), load)
    if as_json:
        print(json.dumps(_as_dict(load, made, refused, sentences), indent=2))
        return
    console = PlainConsole()
    console.print(Text(_headline(load)))
    print_table(console, _table(made))
    for name, error in refused.items():
        console.print(Text(f"{name} does not fit: it needs {_needed(error)}", style="dim"))
    for sentence in sentences:
        console.print(Text(sentence))
    console.print(Text(_fine_print(load), style="dim"))


def _check_counts(group: int, context: int, batch: int) -> None:
    if group < 0 or context < 1 or batch < 1:
        raise ConfigError(
            f"--group {group}, --context {context} and --batch {batch} must be at least 1"
        )


def predictions(
    load: "Workload", names: list[str], group_tokens: int | None = None
) -> "tuple[list[Prediction], dict[str, BudgetError]]":
    """Predict policies, the fastest first; and the errors of those that do not fit.

    Raises:
        ConfigError: a policy without a cost model.
        BudgetError: none fits; names the smallest budget that would do.
    """
    from penstock.tuner.cost_model import predict
    from penstock.tuner.step_work import make_policy

    made, refused = [], {}
    for name in names:
        try:
            policy = make_policy(name, group_tokens or _DEFAULT_GROUP_TOKENS)
            made.append(predict(policy, load))
        except BudgetError as error:
            refused[name] = error
    if not made:
        raise min(refused.values(), key=lambda error: error.needed_bytes or load.full_bytes)
    return sorted(made, key=lambda prediction: -prediction.tokens_per_s), refused


def _headline(load: "Workload") -> str:
    return (
        f"{load.model.name} on {load.hardware.title} with {load.disk.title}: {load.batch} x "
        f"{load.context:,} tokens\nKV in full: {format_bytes(load.full_bytes)}; memory for KV: "
        f"{format_bytes(load.limit_bytes)}; weights: {format_bytes(load.model.weight_bytes)}"
        + (f"; recurrent states: {format_bytes(load.state_bytes)}" if load.state_bytes else "")
    )


def _table(made: "list[Prediction]") -> Table:
    table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for title in ("tokens/s", "first s", "stall", "memory", "read/token", "written"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in made:
        table.add_row(
            row.policy, f"{row.tokens_per_s:.3g}", f"{row.first_token_s:,.0f}",
            f"{100 * row.stall_share:.0f} %", format_bytes(row.resident_bytes),
            format_bytes(row.read_bytes_per_token), format_bytes(row.written_bytes),
        )  # fmt: skip
    return table


def _needed(error: BudgetError) -> str:
    return "more" if error.needed_bytes is None else format_bytes(error.needed_bytes)


def _fine_print(load: "Workload") -> str:
    return (
        f"Predicted, nothing measured: presets of {load.hardware.name} and {load.disk.name}, "
        f"{100 * load.reuse_rate:.0f} % of a selection reused. --json has every constant's source."
    )


def _as_dict(
    load: "Workload",
    made: "list[Prediction]",
    refused: dict[str, BudgetError],
    sentences: list[str],
) -> dict[str, Any]:
    """Everything as plain data; sizes in bytes, times in seconds."""
    return {
        "simulated": True,
        "model": load.model.name,
        "weight_bytes": load.model.weight_bytes,
        "hardware": _hardware_dict(load.hardware),
        "disk": {"name": load.disk.name, "source": load.disk.source},
        "context": load.context,
        "batch": load.batch,
        "full_bytes": load.full_bytes,
        "state_bytes": load.state_bytes,
        "limit_bytes": load.limit_bytes,
        "reuse_rate": load.reuse_rate,
        "predictions": [asdict(row) for row in made],
        "refused": {name: error.needed_bytes for name, error in refused.items()},
        "advice": sentences,
    }


def _hardware_dict(machine: "Hardware") -> dict[str, Any]:
    names = [name for name in type(machine).__slots__ if name != "source"]
    return {name: getattr(machine, name) for name in names} | {"source": dict(machine.source)}
