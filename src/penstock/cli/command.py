"""PenstockCommand: what every command does beside its own; TorchCommand: one that needs torch."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from penstock.cli.entry import EXIT_INTERRUPTED, INTERRUPTED
from penstock.core.renamed_options import under_new_names

RENAMED: Mapping[str, Mapping[str, str]] = {
    "generate": {"--prefill-chunk": "--chunk"},
    "search": {"--store": "--disk"},
    "search plan": {"--tokens": "--max-new-tokens"},
    "doc add": {"--prefill-chunk": "--chunk"},
    "doc ask": {"--prefill-chunk": "--chunk"},
    "devices": {"--path": "--disk"},
}
"""Former names of options, by command; they still work."""
SETTINGS_ERROR = "penstock.cli.settings_error"
"""In a context's `meta`: what is wrong with the settings file."""


class PenstockCommand(TyperCommand):
    """A command whose options also go by their former names, and that refuses a bad settings file.

    The file is refused only here, so that help and `penstock config` work beside a bad one.
    """

    path = ""
    """Its words behind `penstock`, such as "doc add"; set by the group that holds it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, former names of options among them."""
        try:
            return super().parse_args(ctx, list(under_new_names(args, RENAMED.get(self.path, {}))))
        except typer.BadParameter as error:
            named: Any = error.param
            source = None if named is None else ctx.get_parameter_source(named.name)
            if getattr(source, "name", "") == "ENVIRONMENT":
                names = [each for each in named.envvar if os.environ.get(each)]
                error.message += f" (out of {names[0]})"
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            ConfigError: the settings file cannot be used.
        """
        if SETTINGS_ERROR in ctx.meta:
            raise ctx.meta[SETTINGS_ERROR]
        return super().invoke(ctx)


class TorchCommand(PenstockCommand):
    """Its help and a mistyped option answer at once: torch alone takes seconds to import."""

    def invoke(self, ctx: Any) -> Any:
        """Import torch and run the command."""
        if SETTINGS_ERROR not in ctx.meta:
            import_torch()
        return super().invoke(ctx)


def import_torch() -> None:
    """Import torch; a Ctrl-C meanwhile ends the process with one line."""
    former = signal.getsignal(signal.SIGINT)
    # An exception inside the import of torch's own code ends the process with an abort.
    guarded = (
        "torch" not in sys.modules
        and former is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if guarded:
        signal.signal(signal.SIGINT, _leave_at_once)
    import torch  # noqa: F401

    if guarded:
        signal.signal(signal.SIGINT, former)


def _leave_at_once(*_: object) -> None:
    """Nothing has been opened yet."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(EXIT_INTERRUPTED)
