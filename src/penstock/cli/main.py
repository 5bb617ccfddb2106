"""The `penstock` command: its subcommands, and errors as one line with an exit code."""

import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.audit import AUDIT, PASS_ON, audit_command
from penstock.cli.bench import bench_app
from penstock.cli.calibrate import calibrate_command
from penstock.cli.chat import chat_command
from penstock.cli.cluster import cluster_app
from penstock.cli.command import SETTINGS_ERROR, PenstockCommand, TorchCommand
from penstock.cli.config import ConfigCommand, config_command
from penstock.cli.console import PlainConsole, say
from penstock.cli.demo import demo_command
from penstock.cli.device import device_app
from penstock.cli.devices import devices_command
from penstock.cli.doc import doc_app
from penstock.cli.fetch import fetch_command
from penstock.cli.generate import generate_command
from penstock.cli.log import LogLevel, show_logs
from penstock.cli.plan import plan_command
from penstock.cli.search import SearchCommand, search_command
from penstock.cli.serve import serve_command
from penstock.cli.settings import SettingsFile, name_variables, settings_path
from penstock.cli.tune import tune_command
from penstock.core.byte_size import enough_size
from penstock.core.errors import BudgetError, ConfigError, PenstockError, StorageError
from penstock.kernels.native import compiled

_MOST_POLICIES = 3
KERNELS = "PENSTOCK_KERNELS"
"""Environment variable: how much of the compiled kernels may be used."""
EXIT_FAILED = 1
"""The run failed: the disk, or something unforeseen."""
EXIT_BAD_INPUT = 2
"""What was asked for cannot be done; the same code as for a mistyped option."""


ANYWHERE = {"--debug": 0, "--log-level": 1}
"""Options of `penstock` itself that may also stand behind a command, and how many words follow."""


class PenstockGroup(TyperGroup):
    """Runs a subcommand and turns what it raises into one line on stderr and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        name_variables(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options that stand in front of the subcommand, or belong there."""
        return super().parse_args(ctx, list(_own_first(args)))

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
                _say_error(str(error), next_step(error))
            elif type(error).__module__.startswith(("typer", "click")):
                raise
            else:
                _say_error(f"unexpected {type(error).__name__}: {error} (--debug shows where)")
            code = EXIT_BAD_INPUT if _is_bad_input(error) else EXIT_FAILED
            raise typer.Exit(code) from None


def _own_first(args: list[str]) -> Iterator[str]:
    """The words of a command line, with the options of `penstock` itself in front."""
    end = args.index("--") if "--" in args else len(args)
    own: list[str] = []
    rest: list[str] = []
    words = iter(args[:end])
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in ANYWHERE:
            rest.append(word)
            continue
        own.append(word)
        if ANYWHERE[name] and not equals:
            own += [next(words, "")]
    yield from (*own, *rest, *args[end:])


app = typer.Typer(
    name="penstock",
    cls=PenstockGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]},
)
app.command("demo", cls=TorchCommand)(demo_command)
app.command("generate", cls=TorchCommand)(generate_command)
app.command("chat", cls=TorchCommand)(chat_command)
app.command("search", cls=SearchCommand)(search_command)
app.command("serve", cls=TorchCommand)(serve_command)
app.command("calibrate", cls=TorchCommand)(calibrate_command)
app.command("fetch", cls=PenstockCommand)(fetch_command)
app.command("devices", cls=PenstockCommand)(devices_command)
app.command("plan", cls=TorchCommand)(plan_command)
app.command("tune", cls=TorchCommand)(tune_command)
app.command("audit", cls=TorchCommand, context_settings=PASS_ON, short_help=AUDIT)(audit_command)
app.add_typer(doc_app, short_help="Store a long text's KV cache, and ask it again and again.")
app.add_typer(bench_app)
app.add_typer(device_app)
app.add_typer(cluster_app)
app.command("config", cls=ConfigCommand)(config_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            envvar="PENSTOCK_LOG_LEVEL", show_envvar=False,
            help="Show what Penstock and transformers log, from this level on.",
        ),
    ] = LogLevel.ERROR,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:  # fmt: skip
    """Long-context language models in a fixed memory budget, with the KV cache on disk.

    --memory bounds the KV cache; the weights of the model come on top. The table at the end of a
    run shows both beside the peak of the process. penstock demo is a first try.

    Defaults of options come from PENSTOCK_* variables and a file; penstock config shows them.
    """
    del version
    source = context.get_parameter_source("log_level")
    try:
        settings = SettingsFile(settings_path(), context)
        context.default_map = settings.default_map
        if settings.log_level is not None and source is not None and source.name == "DEFAULT":
            log_level = LogLevel(settings.log_level)
    except ConfigError as error:
        context.meta[SETTINGS_ERROR] = error
    limit_kernels(os.environ.get(KERNELS, "auto"))
    show_logs(log_level, warn=debug)


def limit_kernels(level: str) -> None:
    """Use no more of the compiled kernels than PENSTOCK_KERNELS says; see `compiled.LEVELS`.

    Raises:
        ConfigError: there is no such level.
    """
    try:
        compiled.limit(level)
    except ValueError as error:
        raise ConfigError(f"{KERNELS}: {error}") from None


def next_step(error: PenstockError) -> str:
    """What to type next, where an error knows; else nothing."""
    if not isinstance(error, BudgetError) or error.needed_bytes is None:
        return ""
    steps = [f"--memory {enough_size(error.needed_bytes)}"]
    if error.adapter_bytes is not None:
        least = enough_size(error.adapter_bytes)
        steps.append(f"penstock calibrate, with whose --adapter {least} would do")
    if error.fitting:
        steps.append(f"--policy {' or '.join(error.fitting[:_MOST_POLICIES])}, which would fit")
    return "; or ".join(steps)


def _is_bad_input(error: Exception) -> bool:
    return isinstance(error, PenstockError) and not isinstance(error, StorageError)


def _say_error(message: str, advice: str = "") -> None:
    line = " ".join(message.split())
    _say(Text.assemble(("error: ", "bold red"), (line, "red")))
    if advice:
        _say(Text.assemble(("try: ", "bold"), advice))


def _say(line: Text) -> None:
    PlainConsole(stderr=True).print(line, soft_wrap=True)
