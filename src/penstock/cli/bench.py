"""`penstock bench`: the benchmarks, under one command."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from penstock.cli.console import plain_output
from penstock.cli.torch_command import TorchCommand
from penstock.core.errors import ConfigError

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
    from penstock.bench import accuracy

    run_program(accuracy.run, context)


@bench_app.command("documents", cls=TorchCommand, context_settings=PASS_ON)
def documents_command(context: typer.Context) -> None:
    """Stored documents: first token when reopened, checked reading (--help lists the options)."""
    from penstock.bench.documents import program

    run_program(program.run, context)


@bench_app.command("needles", cls=TorchCommand, context_settings=PASS_ON)
def needles_command(context: typer.Context) -> None:
    """A needle at every depth of documents of every length (--help lists the options)."""
    from penstock.bench import needles

    run_program(needles.run, context)


@bench_app.command("record", cls=TorchCommand, context_settings=PASS_ON)
def record_command(context: typer.Context) -> None:
    """Take down what a policy selects on a real model (--help lists the options)."""
    from penstock.bench import record_selections

    run_program(record_selections.run, context)


@bench_app.command("search", cls=TorchCommand, context_settings=PASS_ON)
def search_command(context: typer.Context) -> None:
    """Step-wise beam search end to end, strategy by strategy (--help lists the options)."""
    from penstock.bench.search import speed

    run_program(speed.run, context)


@bench_app.command("settings", cls=TorchCommand, context_settings=PASS_ON)
def settings_command(context: typer.Context) -> None:
    """Throughput in settings A and B of the KVSwap paper (--help lists the options)."""
    from penstock.bench.settings import program

    run_program(program.run, context)


@bench_app.command("throughput", cls=TorchCommand, context_settings=PASS_ON)
def throughput_command(context: typer.Context) -> None:
    """Tokens per second, step times, bytes read (--help lists the options)."""
    from penstock.bench import throughput

    run_program(throughput.run, context)


@bench_app.command("tune", cls=TorchCommand, context_settings=PASS_ON)
def tune_command(context: typer.Context) -> None:
    """The tuner against a sweep, and its predictions: sweep or predict (--help lists them)."""
    from penstock.bench.tuning import program

    run_program(program.run, context)


@bench_app.command("report", cls=TorchCommand, context_settings=PASS_ON)
def report_command(context: typer.Context) -> None:
    """Draw figures from result files (--help lists the options)."""
    try:
        from penstock.bench.figures import report
    except ImportError as error:
        raise ConfigError(
            f"figures need matplotlib: pip install 'penstock[bench]' ({error})"
        ) from error
    run_program(report.run, context)
