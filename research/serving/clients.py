"""Clients that ask an engine at the same moment, and what they see of it."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.generation.serving.engine import Engine
from penstock.generation.serving.events import Event, Prefill, Token
from penstock.generation.serving.request import Request
from research.packed_weights.loading import anonymous_bytes

_EVERY_S = 0.05


class Client:
    """One request, with the times at which its tokens came."""

    def __init__(self, engine: Engine, request: Request) -> None:
        """Ask."""
        self._start_s = time.perf_counter()
        self._token_s: list[float] = []
        self._chunk_s: list[float] = []
        self._handle = engine.submit(request, self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Token):
            self._token_s.append(time.perf_counter())
        elif isinstance(event, Prefill):
            self._chunk_s.append(time.perf_counter())

    def wait(self) -> dict[str, Any]:
        """What it saw, once it has its answer."""
        done = self._handle.result()
        heard = [self._start_s, *self._chunk_s, *self._token_s]
        return {
            "prompt_tokens": done.usage.prompt_tokens, "new_tokens": done.usage.new_tokens,
            "cached_tokens": done.usage.cached_tokens,
            "token_ids": done.outputs[0].token_ids, "queue_s": done.timings.queue_s,
            "first_token_s": self._token_s[0] - self._start_s,
            "total_s": self._token_s[-1] - self._start_s,
            "between_s": np.diff(self._token_s).tolist(),
            "longest_silence_s": float(np.diff(heard).max()),
        }  # fmt: skip


class MemoryWatch:
    """Samples what an engine has promised and what the process holds, while it is open."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._stop = engine, threading.Event()
        self._before = anonymous_bytes()
        self.figures = {"promised_bytes": 0, "process_growth_bytes": 0, "samples": 0}
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        most = self.figures
        while not self._stop.wait(_EVERY_S):
            most["promised_bytes"] = max(most["promised_bytes"], self._engine.stats().used_bytes)
            grown = anonymous_bytes() - self._before
            most["process_growth_bytes"] = max(most["process_growth_bytes"], grown)
            most["samples"] += 1


def at_once(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """All clients ask at the same moment."""
    before = engine.stats()
    start = time.perf_counter()
    with MemoryWatch(engine) as watch:
        clients = [Client(engine, each) for each in requests]
        seen = [each.wait() for each in clients]
    after = engine.stats()
    steps = after.steps - before.steps
    rows = (after.step_rows - before.step_rows) / steps if steps else 0.0
    return _summed(seen, time.perf_counter() - start) | watch.figures | {
        "rows_per_step": rows, "budget_bytes": after.limit_bytes,
        "queue_max_s": max(each["queue_s"] for each in seen),
    }  # fmt: skip


def one_by_one(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    """Each client asks when the one before it has its answer."""
    start = time.perf_counter()
    seen = [Client(engine, each).wait() for each in requests]
    return _summed(seen, time.perf_counter() - start)


def _summed(seen: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    new = sum(each["new_tokens"] for each in seen)
    between = [gap for each in seen for gap in each["between_s"]]
    first = [each["first_token_s"] for each in seen]
    return {
        "seconds": seconds, "new_tokens": new, "tokens_per_s": new / seconds,
        "prompt_tokens": sum(each["prompt_tokens"] for each in seen),
        "first_token_p50_s": float(np.percentile(first, 50)),
        "first_token_p99_s": float(np.percentile(first, 99)),
        "between_p50_s": float(np.percentile(between, 50)) if between else 0.0,
        "between_p99_s": float(np.percentile(between, 99)) if between else 0.0,
        "between_max_s": max(between, default=0.0),
        "longest_silence_s": max(each["longest_silence_s"] for each in seen),
        "answers": [each["token_ids"] for each in seen],
    }  # fmt: skip
