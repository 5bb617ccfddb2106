"""llama.cpp's own server: the same prompts, in as many slots as there are clients."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import numpy as np

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.shape import KVShape
from research.serving.paged import seen_from_outside

Row = dict[str, Any]
CACHE_TYPES = {"f16": 1.0, "q8_0": 34 / 64, "q4_0": 18 / 64}
"""Kinds of its KV cache, finest first, and their size as a share of 16 bits."""
_START_S = 120.0
_ANSWER_S = 3600.0
"""Most seconds until it is there, and until a token comes."""


def cache_type(shape: KVShape, tokens: int, limit_bytes: int, *, fused: bool = True) -> str:
    """The finest kind of cache in which so many tokens fit a budget.

    Args:
        fused: by llama.cpp's fused attention, which alone reads values in few bits.

    Raises:
        ConfigError: they fit in none.
    """
    full = shape.full_cache_bytes(1, tokens)
    for name, share in CACHE_TYPES.items():
        if full * share <= limit_bytes and (fused or name == "f16"):
            return name
    raise ConfigError(f"llama.cpp holds no {tokens:,} tokens in {format_bytes(limit_bytes)}")


@contextmanager
def _running(program: Path, options: Sequence[str], port: int) -> Iterator[int]:
    """A server that answers; its process's number."""
    command = [str(program), *options, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while not _is_well(port):
            if process.poll() is not None or time.monotonic() > until:
                raise PenstockError(f"{program.name} does not start: {' '.join(command)}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _is_well(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


class _Client:
    """One request on a thread of its own, and when its tokens came."""

    def __init__(self, port: int, prompt: Sequence[int], answer: int) -> None:
        """Ask."""
        self.start_s, self.token_s = time.perf_counter(), list[float]()
        self.error: Exception | None = None
        self._asked = {
            "prompt": list(prompt), "n_predict": answer, "stream": True, "temperature": 0,
            "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        self._port = port
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        request = HttpRequest(
            f"http://127.0.0.1:{self._port}/completion", json.dumps(self._asked).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urlopen(request, timeout=_ANSWER_S) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        tokens = json.loads(line[6:]).get("tokens") or ()
                        self.token_s += [time.perf_counter()] * len(tokens)
        except (URLError, OSError, ValueError) as error:
            self.error = error

    def wait(self) -> None:
        """Until it has its answer."""
        self._thread.join()


def served(
    program: Path, model: Path, prompts: Sequence[Sequence[int]], answer: int, *, shape: KVShape,
    limit_bytes: int, threads: int, fused: bool = True, port: int = 18_080,
) -> Row:  # fmt: skip
    """All requests asked at once; starting the server and a first answer are not timed.

    Args:
        model: a GGUF file.
        prompts: token ids of each request.
        answer: tokens of each answer.
        shape: of the model, by which its cache is priced.
        limit_bytes: of the cache.
        fused: as for `cache_type`; llama.cpp's own choice.

    Raises:
        ConfigError: the requests do not fit the budget.
        PenstockError: the server does not start, or a request was not answered in full.
    """
    tokens = sum(len(each) + answer + 8 for each in prompts)
    kind = cache_type(shape, tokens, limit_bytes, fused=fused)
    options = [
        "-m", str(model), "-c", str(tokens), "--parallel", str(len(prompts)), "--kv-unified",
        "--threads", str(threads), "--threads-batch", str(threads),
        "-fa", "on" if fused else "off", "--cache-type-k", kind,
        "--cache-type-v", kind, "--cache-ram", "0", "--no-webui",
    ]  # fmt: skip
    with _running(program, options, port) as process:
        _Client(port, prompts[0][:64], 2).wait()
        start_s = time.perf_counter()
        clients = [_Client(port, each, answer) for each in prompts]
        for client in clients:
            client.wait()
        seconds = time.perf_counter() - start_s
        peak_bytes = _peak_bytes(process)
    for client in clients:
        if client.error is not None or len(client.token_s) < answer:
            said = client.error or f"{len(client.token_s)} of {answer} tokens"
            raise PenstockError(f"llama.cpp has not answered every request in full: {said}")
    first = [client.token_s[0] - client.start_s for client in clients]
    between = np.concatenate([np.diff(client.token_s) for client in clients])
    return seen_from_outside(seconds, answer, first, between) | {
        "peak_bytes": peak_bytes, "cache_type": kind, "cache_tokens": tokens,
        "cache_bytes": int(shape.full_cache_bytes(1, tokens) * CACHE_TYPES[kind]),
    }  # fmt: skip


def _peak_bytes(process: int) -> int:
    """What a process held at most, mapped weights included."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise PenstockError("this system does not say what a process holds")
