"""`penstock bench`: the benchmarks, under one command."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from penstock.cli.console import plain_output
from penstock.cli.torch_command import TorchCommand
from penstock.core.errors import ConfigError

RESEARCH = {"report": "figures", "search": "search", "settings": "settings", "tune": "tuning"}
"""Commands of earlier versions that a checkout alone has, as `python -m research.NAME`."""
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run_program(run: Callable[[Sequence[str]], Any], context: typer.Context) -> None:
    """Run a program that prints by itself."""
    with plain_output():
        run(context.args)


bench_app = typer.Typer(
    name="bench", help="Measure accuracy and throughput.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip


@bench_app.command("accuracy", cls=TorchCommand, context_settings=PASS_ON)
def accuracy_command(context: typer.Context) -> None:
    """What a memory budget costs in right answers (--help lists the options)."""
    from penstock.evaluate import accuracy

    run_program(accuracy.run, context)


@bench_app.command("documents", cls=TorchCommand, context_settings=PASS_ON)
def documents_command(context: typer.Context) -> None:
    """Stored documents: first token when reopened, checked reading (--help lists the options)."""
    from penstock.evaluate.documents import program

    run_program(program.run, context)


@bench_app.command("needles", cls=TorchCommand, context_settings=PASS_ON)
def needles_command(context: typer.Context) -> None:
    """A needle at every depth of documents of every length (--help lists the options)."""
    from penstock.evaluate import needles

    run_program(needles.run, context)


@bench_app.command("record", cls=TorchCommand, context_settings=PASS_ON)
def record_command(context: typer.Context) -> None:
    """Take down what a policy selects on a real model (--help lists the options)."""
    from penstock.evaluate import record_selections

    run_program(record_selections.run, context)


@bench_app.command("throughput", cls=TorchCommand, context_settings=PASS_ON)
def throughput_command(context: typer.Context) -> None:
    """Tokens per second, step times, bytes read (--help lists the options)."""
    from penstock.evaluate import throughput

    run_program(throughput.run, context)


def answer_moved_command(context: typer.Context) -> None:
    """Say where a program is that reproduces papers."""
    name = context.info_name or ""
    raise ConfigError(
        f"penstock bench {name} is not in the installed package; in a checkout of Penstock: "
        f"python -m research.{RESEARCH[name]}"
    )


for moved in RESEARCH:
    bench_app.command(moved, hidden=True, context_settings=PASS_ON)(answer_moved_command)
