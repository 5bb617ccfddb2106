"""`penstock bench`: the benchmarks, under one command."""

import importlib
from collections.abc import Callable

import typer

from penstock.cli.command import TorchCommand
from penstock.cli.console import plain_output
from penstock.core.errors import ConfigError

PROGRAMS = {
    "accuracy": ("accuracy", "What a memory budget costs in right answers"),
    "documents": (
        "documents.program",
        "Stored documents: first token when reopened, checked reading",
    ),
    "needles": ("needles", "A needle at every depth of documents of every length"),
    "record": ("record_selections", "Take down what a policy selects on a real model"),
    "throughput": ("throughput", "Tokens per second, step times, bytes read"),
}
"""Modules of `penstock.evaluate`, and what they measure."""
RESEARCH = {"report": "figures", "search": "search", "settings": "settings", "tune": "tuning"}
"""Commands of earlier versions that a checkout alone has, as `python -m research.NAME`."""
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


bench_app = typer.Typer(
    name="bench", help="Measure accuracy and throughput.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip


def _run_program(module: str) -> Callable[[typer.Context], None]:
    """A command that passes its words on to `penstock.evaluate.MODULE`."""

    def command(context: typer.Context) -> None:
        program = importlib.import_module(f"penstock.evaluate.{module}")
        with plain_output():
            program.run(context.args)

    return command


for name, (program, about) in PROGRAMS.items():
    bench_app.command(
        name, cls=TorchCommand, context_settings=PASS_ON,
        short_help=f"{about}.", help=f"{about} (--help lists the options).",
    )(_run_program(program))  # fmt: skip


def answer_moved_command(context: typer.Context) -> None:
    """Say where a program is that reproduces papers."""
    name = context.info_name or ""
    raise ConfigError(
        f"penstock bench {name} is not in the installed package; in a checkout of Penstock: "
        f"python -m research.{RESEARCH[name]}"
    )


for moved in RESEARCH:
    bench_app.command(moved, hidden=True, context_settings=PASS_ON)(answer_moved_command)
