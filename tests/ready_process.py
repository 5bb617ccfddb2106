"""ReadyProcess: a program in a process that holds torch and transformers from its first moment.

To import them takes four seconds. Here one process does so for all tests of a worker, and forks the
others. How Python starts, and what it imports, needs a process that `subprocess` starts.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = (
    "penstock.cli.main", "penstock.generation.engine", "penstock.evaluate.accuracy_workers",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
LONGEST_FOLDER = 60
"""Characters of a temporary folder that leave room for a socket's name: it has 107."""


def forks() -> Any:
    """What `multiprocessing` calls a context; the first process of it makes the imports.

    In a temporary folder with too long a name each process makes them.
    """
    if len(tempfile.gettempdir()) >= LONGEST_FOLDER:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


class ReadyProcess:
    """Runs a program from its construction on; use it as a context manager, which kills it."""

    def __init__(
        self, code: str, *arguments: str, folder: Path | None = None,
        environment: Mapping[str, str] | None = None, terminal: str | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            code: as for `python -c`.
            folder: the current one; None: that of this process.
            environment: what is added to this process's.
            terminal: the name of one that stands for all three streams, and is its terminal;
                None: stdin is empty.
        """
        context = forks()
        ours, theirs = context.Pipe(duplex=False)
        descriptor, name = tempfile.mkstemp(prefix="ready-process-")
        os.close(descriptor)
        self._errors = Path(name)
        added = {**os.environ, **(environment or {})}
        self._process = context.Process(
            target=_run,
            args=(code, arguments, str(folder or Path.cwd()), added, theirs, name, terminal),
        )
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()

    def __enter__(self) -> "ReadyProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self._errors.unlink()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float = 240.0) -> int:
        """Its exit status, once it has ended."""
        self._process.join(timeout)
        code = self.poll()
        assert code is not None, f"runs longer than {timeout} s"
        return code

    def send_signal(self, number: int) -> None:
        """If it still runs."""
        if self.poll() is None:
            # It may end between the two; its server reaps it before the status is read here.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """At once."""
        self.send_signal(signal.SIGKILL)

    def errors(self) -> str:
        """What it has written to stderr."""
        return self._errors.read_text(encoding="utf-8")


def run_ready(command: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
    """Stands in for `subprocess.run` of a `python_command`, whose output is captured as text."""
    at = command.index("-c")
    with ReadyProcess(command[at + 1], *command[at + 2 :]) as run:
        said = run.stdout.read()
        return subprocess.CompletedProcess([*command], run.wait(), said, run.errors())


def _run(
    code: str, arguments: tuple[str, ...], folder: str, environment: dict[str, str],
    stdout: Connection, stderr: str, terminal: str | None,
) -> None:  # fmt: skip
    os.chdir(folder)
    os.environ.update(environment)
    if terminal is None:
        os.dup2(stdout.fileno(), 1)
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    else:
        os.setsid()
        tty = os.open(terminal, os.O_RDWR)  # the first that a session opens is its own
        for stream in range(3):
            os.dup2(tty, stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(stream, mode, 1, encoding="utf-8", closefd=False)  # noqa: SIM115
        for stream, mode in enumerate("rww")
    )
    sys.argv = ["-c", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
