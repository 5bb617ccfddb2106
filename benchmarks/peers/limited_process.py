"""Run one process under a memory limit and a time limit, and say how it ended.

With a control group the kernel holds the limit. Without one, the kernel's own count of the
process's most resident memory is watched, and the process is killed when it passes the limit;
`RLIMIT_DATA` ends what asks for far more at once.
"""

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from penstock.evaluate.memory_cgroup import MemoryCgroup

PHASE = "phase: "
POLL_S = 0.05
CGROUP = "memory control group"
WATCHED = "RLIMIT_DATA, and killed when the kernel's peak of resident memory passed the limit"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a process may use."""

    memory_bytes: int
    data_extra_bytes: int = 0
    """Added to the limit for `RLIMIT_DATA`, which also counts private mappings of files."""
    timeout_s: float
    cgroup: Path | None = None
    """A control group below which one for the process may be made."""
    cores: tuple[int, ...] = ()
    """That it may run on; empty: any."""

    @property
    def how(self) -> str:
        """How the memory limit is held."""
        return WATCHED if self.cgroup is None else CGROUP


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended.

    Attributes:
        failure: None when all went well, else what happened, in one line.
        kind: "", "memory", "time" or "error".
        phase: the last phase that the process named.
        peak_bytes: most resident memory; the group's with a control group, page cache included.
    """

    failure: str | None
    kind: str
    phase: str
    peak_bytes: int
    seconds: float
    output: str


def run_limited(command: Sequence[str], limits: Limits, environment: Mapping[str, str]) -> Ending:
    """Run a process to its end, or to its limits'.

    Raises:
        ConfigError: the control group cannot be made.
    """
    group = None if limits.cgroup is None else MemoryCgroup(limits.cgroup)
    try:
        if group is not None:
            group.limit(limits.memory_bytes)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            return _run(command, limits, environment, group, out, errors)
    finally:
        if group is not None:
            with contextlib.suppress(OSError):
                group.path.rmdir()


def _run(
    command: Sequence[str],
    limits: Limits,
    environment: Mapping[str, str],
    group: MemoryCgroup | None,
    out: IO[str],
    errors: IO[str],
) -> Ending:
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=dict(environment),
        start_new_session=True, preexec_fn=_before_start(limits, group),
    )  # fmt: skip
    peak, stopped = 0, ""
    try:
        while process.poll() is None:
            peak = max(peak, _peak_bytes(process.pid))
            if group is None and peak > limits.memory_bytes:
                stopped = "memory"
            elif time.perf_counter() - start > limits.timeout_s:
                stopped = "time"
            if stopped:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    finally:
        _kill(process)
    seconds = time.perf_counter() - start
    if group is not None:
        peak = group.peak_bytes or peak
    said, complaints = _content(out), _content(errors)
    kind = stopped or _kind(process.returncode, complaints, group)
    return Ending(
        failure=_failure(kind, complaints, process.returncode, peak, limits), kind=kind,
        phase=_last_phase(complaints), peak_bytes=peak, seconds=seconds, output=said,
    )  # fmt: skip


def _before_start(limits: Limits, group: MemoryCgroup | None) -> Callable[[], None]:
    data = limits.memory_bytes + limits.data_extra_bytes

    def prepare() -> None:
        if limits.cores:
            os.sched_setaffinity(0, limits.cores)
        if group is not None:
            group.join()
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (data, data))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return prepare


def _kill(process: "subprocess.Popen[Any]") -> None:
    """End the process and whatever it started; they are a session of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kind(code: int, complaints: str, group: MemoryCgroup | None) -> str:
    if code == 0:
        return ""
    if code == -signal.SIGKILL and group is not None:
        return "memory"
    words = ("can't allocate memory", "cannot allocate memory", "memoryerror", "bad_alloc",
             "failed to allocate", "out of memory")  # fmt: skip
    return "memory" if any(word in complaints.lower() for word in words) else "error"


def _failure(kind: str, complaints: str, code: int, peak: int, limits: Limits) -> str | None:
    if not kind:
        return None
    last = _last_error(complaints)
    if kind == "time":
        return f"not ready after {limits.timeout_s:.0f} s"
    if kind == "memory" and (peak > limits.memory_bytes or code == -signal.SIGKILL):
        return f"stopped at {peak / 2**30:.2f} GiB resident"
    if code < 0 and not last:
        return f"ended by {signal.Signals(-code).name}"
    return last or f"ended with code {code}"


def _last_phase(complaints: str) -> str:
    phases = [line for line in complaints.splitlines() if line.startswith(PHASE)]
    return phases[-1].removeprefix(PHASE).strip() if phases else "start"


def _last_error(complaints: str) -> str:
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not line.startswith(PHASE)), "")


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _peak_bytes(pid: int) -> int:
    """The kernel's high-water mark of a process's resident memory; 0 once it is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
