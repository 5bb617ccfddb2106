"""Tracer: spans of compute and I/O, written as a Chrome trace (chrome://tracing, Perfetto)."""

import json
import os
import threading
from pathlib import Path

from penstock.core.atomic_write import json_kind, write_atomically

FORMAT = "penstock-trace-1"
TRACE = json_kind("trace of penstock", "penstock-trace-")


class Tracer:
    """Collects spans in memory and writes them out at the end; thread-safe.

    Spans are (name, track, start, end) with `time.perf_counter_ns` times. A track is a row in the
    viewer: "compute", "read", "write".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, str, int, int, dict[str, int | float | str]]] = []

    def add(
        self, name: str, track: str, start_ns: int, end_ns: int, **args: int | float | str
    ) -> None:
        """Record one finished span."""
        with self._lock:
            self._spans.append((name, track, start_ns, end_ns, args))

    def write(self, path: str | Path) -> None:
        """Write the Chrome trace event format, times in microseconds from the first span."""
        with self._lock:
            spans = list(self._spans)
        origin = min((start for _, _, start, _, _ in spans), default=0)
        tracks = {track: i for i, track in enumerate(dict.fromkeys(s[1] for s in spans))}
        pid = os.getpid()
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
            for track, tid in tracks.items()
        ]
        events += [
            {
                "ph": "X", "name": name, "cat": track, "pid": pid, "tid": tracks[track],
                "ts": (start - origin) / 1e3, "dur": (end - start) / 1e3, "args": args,
            }
            for name, track, start, end, args in spans
        ]  # fmt: skip
        made = {"format": FORMAT, "displayTimeUnit": "ms", "traceEvents": events}
        write_atomically(json.dumps(made), Path(path))
