"""The `penstock` command: its subcommands, and errors as one line with an exit code."""

import logging
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.audit import PASS_ON, audit_command
from penstock.cli.bench import bench_app
from penstock.cli.calibrate import calibrate_command
from penstock.cli.console import PlainConsole, say
from penstock.cli.demo import demo_command
from penstock.cli.devices import devices_command
from penstock.cli.doc import doc_app
from penstock.cli.fetch import fetch_command
from penstock.cli.generate import generate_command
from penstock.cli.plan import plan_command
from penstock.cli.search import SearchCommand, search_command
from penstock.cli.torch_command import TorchCommand
from penstock.cli.tune import tune_command
from penstock.core.errors import ConfigError, PenstockError, StorageError
from penstock.kernels.native import compiled

KERNELS = "PENSTOCK_KERNELS"
"""Environment variable: how much of the compiled kernels may be used."""
EXIT_FAILED = 1
"""The run failed: the disk, or something unforeseen."""
EXIT_BAD_INPUT = 2
"""What was asked for cannot be done; the same code as for a mistyped option."""


class PenstockGroup(TyperGroup):
    """Runs a subcommand and turns what it raises into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; with --debug, errors keep their traceback."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            if isinstance(error, PenstockError):
                _say_error(str(error))
            elif type(error).__module__.startswith(("typer", "click")):
                raise
            else:
                _say_error(f"unexpected {type(error).__name__}: {error} (--debug shows where)")
            code = EXIT_BAD_INPUT if _is_bad_input(error) else EXIT_FAILED
            raise typer.Exit(code) from None


app = typer.Typer(
    name="penstock",
    cls=PenstockGroup,
    help="Long-context language models in a fixed memory budget, with the KV cache on disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo", cls=TorchCommand)(demo_command)
app.command("generate", cls=TorchCommand)(generate_command)
app.command("search", cls=SearchCommand)(search_command)
app.command("calibrate", cls=TorchCommand)(calibrate_command)
app.command("fetch")(fetch_command)
app.command("devices")(devices_command)
app.command("plan", cls=TorchCommand)(plan_command)
app.command("tune", cls=TorchCommand)(tune_command)
app.command("audit", cls=TorchCommand, context_settings=PASS_ON)(audit_command)
app.add_typer(doc_app)
app.add_typer(bench_app)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Long-context language models in a fixed memory budget, with the KV cache on disk."""
    del version
    limit_kernels(os.environ.get(KERNELS, "auto"))
    if not debug:
        # What torch and transformers have to say belongs to their own users.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")


def limit_kernels(level: str) -> None:
    """Use no more of the compiled kernels than PENSTOCK_KERNELS says; see `compiled.LEVELS`.

    Raises:
        ConfigError: there is no such level.
    """
    try:
        compiled.limit(level)
    except ValueError as error:
        raise ConfigError(f"{KERNELS}: {error}") from None


def _is_bad_input(error: Exception) -> bool:
    return isinstance(error, PenstockError) and not isinstance(error, StorageError)


def _say_error(message: str) -> None:
    line = " ".join(message.split())
    _say(Text.assemble(("error: ", "bold red"), (line, "red")))


def _say(line: Text) -> None:
    PlainConsole(stderr=True, soft_wrap=True).print(line)
