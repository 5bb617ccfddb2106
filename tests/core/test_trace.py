"""A trace is the JSON that Chrome's viewer and Perfetto open."""

import json
import threading
from pathlib import Path
from typing import Any

from penstock.core.trace import Tracer


def written(tracer: Tracer, path: Path) -> list[dict[str, Any]]:
    tracer.write(path / "trace.json")
    document = json.loads((path / "trace.json").read_text())
    assert set(document) == {"format", "traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_spans_are_complete_events(tmp_path: Path) -> None:
    tracer = Tracer()
    tracer.add("read", "disk read", 5_000, 9_000, bytes=512)
    tracer.add("step", "compute", 2_000, 11_000)
    events = written(tracer, tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert sorted(names.values()) == ["compute", "disk read"]
    assert [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in spans] == [
        ("read", "disk read", 3.0, 4.0),
        ("step", "compute", 0.0, 9.0),
    ]
    assert spans[0]["args"] == {"bytes": 512}
    assert len({e["pid"] for e in events}) == 1


def test_nothing_recorded_is_still_a_trace(tmp_path: Path) -> None:
    assert written(Tracer(), tmp_path) == []


def test_threads_lose_nothing(tmp_path: Path) -> None:
    tracer = Tracer()

    def work() -> None:
        for i in range(200):
            tracer.add("x", "compute", i, i + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(e["ph"] == "X" for e in written(tracer, tmp_path)) == 800
