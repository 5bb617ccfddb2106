"""`penstock tune`: the best settings for a model, a disk and a budget."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.console import PlainConsole, plain
from penstock.cli.loading import ModelSource, load_model
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import (
    AdapterOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    WeightsOption,
    memory_option,
)
from penstock.cli.output_file import ForceOption, check_writable
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.methods.tuned_config import Solution
    from penstock.tuner.tune import Tuned

DEFAULT_NAME = "penstock-tuned.json"
"""No model folder has a file of that name, as it has a config.json."""
_STEPS_IN_A_PIPE = 20
_MOST_ROWS = 12

TextOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="UTF-8 text of the kind that will be read; repeatable."),
]
TablesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Lookup tables made before.")
]
SaveTablesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the lookup tables.")
]
FloorOption = Annotated[
    float | None,
    typer.Option(metavar="NATS", help="Largest mean KL divergence from full attention."),
]


class TuneProgress:
    """What is going on and how long it will take: a live bar, or lines in a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = -1
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
                TextColumn("ETA"), TimeRemainingColumn(), console=console, transient=True,
            )  # fmt: skip

    def __enter__(self) -> "TuneProgress":
        if self._bar is not None:
            self._bar.add_task("tune", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, share: float, what: str) -> None:
        """Show that a share in [0, 1] is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, description=what)
            return
        step = int(share * _STEPS_IN_A_PIPE)
        if step > self._shown:
            self._shown = step
            self._console.print(f"tune {100 * share:>3.0f} %  {what}", soft_wrap=True)


def tune_command(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The config, as JSON.")
    ] = Path(DEFAULT_NAME),
    max_context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Most tokens of a sequence, prompt and answer; default: 32768, or the model's "
            "positions where they are fewer.",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Most sequences at once.")] = 1,
    memory: Annotated[
        str,
        memory_option(
            "SIZE|SHARE",
            "Bounds the KV cache of all sequences, not the weights: 2GiB, or 1/13 of the full "
            "cache.",
        ),
    ] = "1/13",
    disk: Annotated[
        str,
        typer.Option(metavar="PATH|nvme|ufs|emmc|auto", help="Where the KV cache will lie."),
    ] = "auto",
    policies: Annotated[
        str, typer.Option(help="Policies to compare, with commas; all for every one.")
    ] = "kvswap",
    text: TextOption = None,
    tables: TablesOption = None,
    save_tables: SaveTablesOption = None,
    adapter: AdapterOption = None,
    floor: FloorOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None, weights: WeightsOption = None,
    revision: RevisionOption = None, offline: OfflineOption = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False, force: ForceOption = False,
) -> None:  # fmt: skip
    """Find the best settings for a model, a disk and a budget.

    The config that comes out is for `penstock generate --config`. Measurements are kept beside it
    until it is done: the same command goes on where an interrupted one was.
    """
    from penstock.methods import POLICIES
    from penstock.tuner.fidelity import KL_FLOOR
    from penstock.tuner.tune import tune

    console = PlainConsole(stderr=True)
    journal = _check_outputs(output, save_tables, force=force)
    names = list(POLICIES) if policies == "all" else _names(policies)
    source = ModelSource(revision, offline, trust_remote_code)
    loaded = load_model(console, model, dtype=dtype, weights=weights, device=device, source=source)
    with TuneProgress(console) as progress, _kept(console, journal):
        tuned = tune(
            loaded, max_context=max_context, max_batch=max_batch, memory=memory, disk=disk,
            policies=names, texts=text or (), tables=tables, adapter=adapter,
            floor=KL_FLOOR if floor is None else floor, progress=progress.update,
            journal=journal,
        )  # fmt: skip
        tuned.save(output)
    if save_tables is not None:
        tuned.tables.save(save_tables)
    if as_json:
        typer.echo(output.read_text(encoding="utf-8").rstrip())
    else:
        _show(console, tuned, output)


def _check_outputs(output: Path, save_tables: Path | None, *, force: bool) -> Path:
    """Refuse files that cannot be written or are somebody else's; returns the journal's.

    Raises:
        ConfigError: see `check_writable`.
    """
    from penstock.engine.adapter import ADAPTER
    from penstock.methods.config_file import CONFIG
    from penstock.tuner.journal import JOURNAL
    from penstock.tuner.lookup_tables import TABLES
    from penstock.tuner.tune import adapter_beside

    journal = output.with_name(output.name + ".partial")
    check_writable(output, "--output", CONFIG, force=force)
    check_writable(adapter_beside(output), "--output", ADAPTER, force=force)
    check_writable(journal, "--output", JOURNAL)
    if save_tables is not None:
        check_writable(save_tables, "--save-tables", TABLES, force=force)
    return journal


@contextlib.contextmanager
def _kept(console: Console, journal: Path) -> Iterator[None]:
    """Say on Ctrl-C where the measurements are."""
    try:
        yield
    except KeyboardInterrupt:
        if journal.exists():
            console.print(
                f"measurements so far are in {journal}: the same command goes on from there",
                soft_wrap=True,
            )
        raise


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--policies {policies!r} names no policy")
    return names


def _show(console: Console, tuned: "Tuned", output: Path) -> None:
    config = tuned.config
    console.print(
        f"{config.model} on {config.disk}{' (simulated)' if config.simulated else ''}: "
        f"{config.max_batch} x {config.max_context:,} tokens in "
        f"{format_bytes(config.limit_bytes)}; {tuned.measured} measurements",
        soft_wrap=True,
    )
    print_table(console, _table(_shown([each for each in config.solutions if each.is_pick])))
    if len({each.policy for each in config.solutions}) + len(tuned.refused) > 1:
        print_table(console, _policies(tuned))
    console.print(Text(config.explanation))
    console.print(
        f"config: {output}; use it with penstock generate {config.model} --config {output} ...",
        soft_wrap=True,
    )


def _shown(picks: list["Solution"]) -> list["Solution"]:
    """All, or where they are many the smallest and the largest batch; the file has the rest."""
    if len(picks) <= _MOST_ROWS:
        return picks
    batches = {each.batch for each in picks}
    return [each for each in picks if each.batch in (min(batches), max(batches))]


def _table(picks: list["Solution"]) -> Table:
    table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("batch", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("pick")
    for title in ("tokens/s", "first s", "memory", "read/token", "KL"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in picks:
        figures: Any = each.measured or each.predicted
        mark = "" if each.measured else "~"
        kl = figures["kl"]
        table.add_row(
            str(each.batch), f"{each.context:,}", _words(each),
            f"{mark}{figures['tokens_per_s']:.3g}", f"{figures['first_token_s']:,.1f}",
            format_bytes(figures["resident_bytes"]), format_bytes(figures["read_bytes_per_token"]),
            "-" if kl is None else f"{kl:.3f}",
        )  # fmt: skip
    table.caption = "~ predicted; the others were run"
    table.caption_justify = "left"
    return table


def _policies(tuned: "Tuned") -> Table:
    """What each policy does at the largest (batch, context), the fastest first."""
    table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for title in ("tokens/s", "KL", "memory", "read/token"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    solutions = tuned.config.solutions
    last = max((each.batch, each.context) for each in solutions)
    there = [each for each in solutions if (each.batch, each.context) == last]
    shown = [(each, each.measured or each.predicted) for each in there]
    for each, figures in sorted(shown, key=lambda pair: -pair[1]["tokens_per_s"]):
        kl = figures["kl"]
        table.add_row(
            each.policy, f"{figures['tokens_per_s']:.3g}", "-" if kl is None else f"{kl:.3f}",
            format_bytes(figures["resident_bytes"]), format_bytes(figures["read_bytes_per_token"]),
            "the pick" if each.is_pick else "",
        )  # fmt: skip
    for name, why in tuned.refused.items():
        table.add_row(name, "", "", "", "", plain(why, "dim"), style="dim")
    return table


def _words(each: "Solution") -> str:
    """The policy with every field that was chosen, at its default or not."""
    short = {
        "group_tokens": "G", "selected_tokens": "MG", "reuse_tokens": "C", "index_bits": "bits",
    }  # fmt: skip
    policy = each.make_policy()
    chosen = {choice.field: getattr(policy, choice.field) for choice in policy.choices}
    fields = [
        f"{short.get(name, name)}={value}"
        for name, value in (chosen | each.fields).items() if value is not None
    ]  # fmt: skip
    return " ".join([each.policy, *fields])
