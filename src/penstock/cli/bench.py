"""`penstock bench`: the benchmarks, under one command."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from penstock.bench import accuracy, needles, record_selections, throughput
from penstock.bench.documents import program as documents
from penstock.bench.search import speed as search_speed
from penstock.bench.settings import program as settings
from penstock.bench.tuning import program as tuning
from penstock.cli.console import plain_output
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


@bench_app.command("accuracy", context_settings=PASS_ON)
def accuracy_command(context: typer.Context) -> None:
    """What a memory budget costs in right answers (--help lists the options)."""
    run_program(accuracy.run, context)


@bench_app.command("documents", context_settings=PASS_ON)
def documents_command(context: typer.Context) -> None:
    """Stored documents: first token when reopened, checked reading (--help lists the options)."""
    run_program(documents.run, context)


@bench_app.command("needles", context_settings=PASS_ON)
def needles_command(context: typer.Context) -> None:
    """A needle at every depth of documents of every length (--help lists the options)."""
    run_program(needles.run, context)


@bench_app.command("record", context_settings=PASS_ON)
def record_command(context: typer.Context) -> None:
    """Take down what a policy selects on a real model (--help lists the options)."""
    run_program(record_selections.run, context)


@bench_app.command("search", context_settings=PASS_ON)
def search_command(context: typer.Context) -> None:
    """Step-wise beam search end to end, strategy by strategy (--help lists the options)."""
    run_program(search_speed.run, context)


@bench_app.command("settings", context_settings=PASS_ON)
def settings_command(context: typer.Context) -> None:
    """Throughput in settings A and B of the KVSwap paper (--help lists the options)."""
    run_program(settings.run, context)


@bench_app.command("throughput", context_settings=PASS_ON)
def throughput_command(context: typer.Context) -> None:
    """Tokens per second, step times, bytes read (--help lists the options)."""
    run_program(throughput.run, context)


@bench_app.command("tune", context_settings=PASS_ON)
def tune_command(context: typer.Context) -> None:
    """The tuner against a sweep, and its predictions: sweep or predict (--help lists them)."""
    run_program(tuning.run, context)


@bench_app.command("report", context_settings=PASS_ON)
def report_command(context: typer.Context) -> None:
    """Draw figures from result files (--help lists the options)."""
    try:
        from penstock.bench.figures import report
    except ImportError as error:
        raise ConfigError(
            f"figures need matplotlib: pip install 'penstock[bench]' ({error})"
        ) from error
    run_program(report.run, context)
