"""TorchCommand: a command that needs torch, and imports it once its options are right."""

import os
import signal
import sys
import threading
from typing import Any

from typer.core import TyperCommand

from penstock.cli.entry import EXIT_INTERRUPTED, INTERRUPTED


class TorchCommand(TyperCommand):
    """Its help and a mistyped option answer at once: torch alone takes seconds to import."""

    def invoke(self, ctx: Any) -> Any:
        """Import torch and run the command."""
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
