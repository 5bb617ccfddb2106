"""What every peer process speaks: one JSON argument in, one JSON line out, phases on stderr.

Needs the standard library only, so that it runs in every peer's environment. README.md has the
fields of requests and replies.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SPEED, RECALL, PROMPT = "speed", "recall", "prompt"
PHASE = "phase: "
WARM_STEPS = 3
WARM_S = 10.0
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one process is to do."""

    job: str
    """`SPEED`, `RECALL` or `PROMPT`."""
    setting: str
    """"CACHE", "CACHE-WEIGHTS" or "CACHE-WEIGHTS-OPTION": which press, policy or type of the
    cache, and the kind of the weights where it is not bf16."""
    model: str
    """A folder that save_pretrained wrote, or a GGUF file."""
    context: int
    """Tokens of the prompt."""
    threads: int
    """For decoding."""
    prompt_threads: int
    """For prompts, and for filling a cache."""
    cores: list[int]
    """One for each thread, those for decoding first; empty: any."""
    seed: int
    keep: str
    """The share of the full cache that peers with a budget may keep, such as "1/13"."""
    prefill: str
    """"synthetic" where the peer's cache can be filled directly, or "real"."""
    chunk: int
    """Tokens per forward pass of a real prefill, where the peer may be fed in pieces."""
    whole: int
    """A prompt of up to so many tokens is read whole, of a longer one two chunks (`PROMPT`)."""
    steps: int
    decode_s: float
    """Most seconds for the measured steps; one is always measured."""
    samples: str
    """File of samples, one JSON object a line (`RECALL`)."""
    recall_s: float
    """No sample is begun after this many seconds."""
    scratch: str
    """An empty folder for files; the driver deletes it."""
    drop_page_cache: bool
    """Whether a peer that reads through the page cache empties it between steps."""
    reports: list[str]
    """Distributions whose versions to report."""

    @property
    def cache(self) -> str:
        """The part of `setting` that is the cache's."""
        return self.setting.split("-")[0]

    @property
    def options(self) -> list[str]:
        """What `setting` says beside cache and weights."""
        return self.setting.split("-")[2:]

    @property
    def kept_share(self) -> float:
        """`keep` as a number."""
        above, _, below = self.keep.partition("/")
        return float(above) / float(below or 1)

    def read_samples(self) -> list[dict[str, Any]]:
        """The samples: "prompt_ids", "question_start", "max_new_tokens", "eos_id"."""
        lines = Path(self.samples).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def weights_of(setting: str) -> str:
    """The kind of weights that a setting asks for."""
    return (*setting.split("-"), "bf16")[1]


Job = Callable[[Request], dict[str, Any]]


def serve(speed: Job, recall: Job, prompt: Job | None = None) -> None:
    """Do what the process's argument asks for and print the reply."""
    request = Request(**json.loads(sys.argv[1]))
    job = {SPEED: speed, RECALL: recall, PROMPT: prompt}[request.job]
    if job is None:
        sys.exit("its prompts are not measured by chunks")
    reply = job(request)
    reply["versions"] = _versions(request.reports)
    sys.stderr.flush()
    print("\n" + json.dumps(reply), flush=True)


def begin_phase(name: str) -> None:
    """Say what is done now, for the row of a process that does not live to tell."""
    print(PHASE + name, file=sys.stderr, flush=True)


def peak_bytes() -> int:
    """Most resident memory since the start or the last `reset_peak`, as the kernel counts it."""
    return _status("VmHWM")


def resident() -> dict[str, int]:
    """Resident memory now: what is nobody's file, and mapped files."""
    return {"anonymous_bytes": _status("RssAnon"), "file_bytes": _status("RssFile")}


def reset_peak() -> None:
    """Count the peak anew from here."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def stay_on(cores: Sequence[int]) -> None:
    """Keep every thread that this process has, and those to come, on these cores."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


def time_steps(
    step: Callable[[], Any], request: Request, between: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Warm up, then decode tokens one by one.

    Args:
        step: decodes one token.
        between: called after each step, outside of the measured time.
    """
    begin_phase("decode")
    if request.cores:
        stay_on(request.cores[: request.threads])
    began = time.perf_counter()
    for _ in range(WARM_STEPS):
        step()
        between()
        if time.perf_counter() - began > WARM_S:
            break
    reset_peak()
    times: list[float] = []
    while len(times) < request.steps and (not times or sum(times) < request.decode_s):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        between()
    return {"step_s": times, "decode_peak_bytes": peak_bytes(), **resident()}


def time_prompt(
    opened: Callable[[int], AbstractContextManager[Callable[[int], Any]]], request: Request
) -> dict[str, Any]:
    """Read a prompt of random tokens, or its first and its last chunk.

    A chunk's time grows evenly with what is before it, so that all chunks take the mean of the two.

    Args:
        opened: a cache that holds so many tokens of noise already; gives what reads more tokens.
    """
    load_peak, chunk = peak_bytes(), min(request.chunk, request.context)
    begin_phase("warm")
    with opened(0) as read:
        read(chunk)
    reset_peak()

    def seconds(before: int, tokens: int) -> float:
        with opened(before) as read:
            start = time.perf_counter()
            read(tokens)
            return time.perf_counter() - start

    begin_phase("prompt")
    whole = request.context <= max(request.whole, 2 * chunk)
    if whole:
        chunk_s, prompt_s = [], seconds(0, request.context)
    else:
        chunk_s = [seconds(0, chunk), seconds(request.context - chunk, chunk)]
        prompt_s = sum(chunk_s) / 2 * request.context / chunk
    return {
        "prompt_s": prompt_s, "chunk_s": chunk_s, "chunk": chunk, "is_whole": whole,
        "load_peak_bytes": load_peak, "peak_bytes": peak_bytes(),
    }  # fmt: skip


def answer_samples(
    answer: Callable[[dict[str, Any]], list[int]], request: Request
) -> dict[str, Any]:
    """Answer samples until they, or the time, are at an end."""
    load_peak = peak_bytes()
    reset_peak()
    began = time.perf_counter()
    answers: list[list[int]] = []
    seconds: list[float] = []
    for sample in request.read_samples():
        if answers and time.perf_counter() - began > request.recall_s:
            break
        begin_phase(f"answer {len(answers) + 1}")
        start = time.perf_counter()
        answers.append(answer(sample))
        seconds.append(time.perf_counter() - start)
    return {
        "answers": answers, "answer_s": seconds, "load_peak_bytes": load_peak,
        "peak_bytes": peak_bytes(),
    }  # fmt: skip


def page_cache_bytes(folder: str | Path) -> int:
    """Bytes of the files in a folder that lie in the page cache."""
    total = 0
    for path in _files(folder):
        with path.open("r+b") as file:
            if not (size := os.fstat(file.fileno()).st_size):
                continue
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            with mmap.mmap(file.fileno(), size) as view:
                start = ctypes.c_char.from_buffer(view)
                failed = ctypes.CDLL(None).mincore(
                    ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages
                )
                del start
            total += 0 if failed else bytes(pages).translate(_LOWEST_BIT).count(1) * mmap.PAGESIZE
    return total


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def drop_page_cache(folder: str | Path) -> None:
    """Write the files in a folder to the disk and take them out of the page cache."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: str | Path) -> list[Path]:
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def _versions(names: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
