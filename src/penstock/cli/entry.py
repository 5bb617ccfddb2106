"""The process's entry point: whatever Ctrl-C interrupts, imports included, ends in one line."""

import _thread
import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from penstock.core.child_python import import_path

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_INTERRUPTED = 130
INTERRUPTED = "interrupted; nothing is left of what was not finished"

_SOON_S = 0.05
_M_ARENA_MAX = -8
"""`mallopt`'s number for it, in glibc's malloc.h."""
_DEFAULTS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    # torch and oneDNN each keep the last 1,024 bf16 products by shape, a quarter of a MiB each,
    # outside any budget. A decode step has about ten shapes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def set_defaults() -> None:
    """Bound what libraries keep of freed memory, where the user has set nothing."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        # glibc gives each thread an arena and never trims the free top of one: tens of MiB each,
        # outside any budget. Environment variables come too late for this process.
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def interrupt_again(ignored: "UnraisableHookArgs") -> None:
    """As `sys.unraisablehook`: a Ctrl-C that fell into a destructor or a callback of a weak
    reference, where Python drops it, comes again a moment later."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(_SOON_S, _press).start()
    else:
        sys.__unraisablehook__(ignored)


def is_of_interrupt(error: BaseException | None) -> bool:
    """Whether an error was made of a Ctrl-C: Python 3.11 makes one of what falls into
    `__set_name__`, and imports of libraries make another one of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _press() -> None:
    """Interrupt the main thread, out of a system call too where there are POSIX's signals."""
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def main() -> None:
    """Run the command line of this process."""
    set_defaults()
    former, sys.unraisablehook = sys.unraisablehook, interrupt_again
    # `python -m penstock` puts the current folder first, and so does a Python that we start.
    sys.path[:] = import_path()
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # What its encoding does not have is told by number, as on stderr, and ends no command.
        sys.stdout.reconfigure(errors="backslashreplace")
    code: object = 0
    try:
        from penstock.cli.main import app

        app(prog_name="penstock")
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as leave:
        code = leave.code
    except Exception as error:
        if not is_of_interrupt(error):
            raise
        code = EXIT_INTERRUPTED
    sys.unraisablehook = former
    # From here on nothing takes time, and a second Ctrl-C must not turn it into a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == EXIT_INTERRUPTED:
        print(INTERRUPTED, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # The stores are closed and their files had no names. Leaving at once keeps the exit code,
        # which Python replaces by SIGINT itself if the interrupt fell into an `eval`.
        os._exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int | None) else 1)
