"""One server that talks, reads documents and loses clients for hours: what it holds stays flat.

    python -m tests.server.soak --minutes 60 --out benchmarks/results/server-soak.json

Not part of the suite. The exit status is 1 where a promise was broken or something has grown.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from penstock.evaluate.result import Result
from tests.server.faults import Faults
from tests.server.server_process import STAGES, ServerProcess, prepare

MOST_GROWN = {"memory_mib": 16.0, "descriptors": 8.0, "threads": 4.0}
"""From the second quarter of the time to the last one, in medians."""
ROUND = 12


def _act(faults: Faults, server: ServerProcess) -> None:
    """One thing that clients do."""
    action = faults.random.choice(("talk", "talk", "ask", "document", "add", "queue", "vanish"))
    faults.counts[action] += 1
    if action == "talk":
        faults.talk(server)
    elif action == "ask" and faults.talks:
        faults.ask(server, faults.random.choice(faults.talks), "a conversation")
    elif action == "document" and faults.documents:
        name, salt = faults.random.choice([*faults.documents])
        faults.ask_document(server, name, salt, f"the document {name}")
    elif action == "add":
        faults.add(server)
    elif action == "queue":
        faults.queueing(server)
    else:
        body = faults.body([{"role": "user", "content": faults.text()}], stream=True)
        server.vanish(
            server.request("/v1/chat/completions", body | {"max_tokens": 200}),
            faults.random.choice(STAGES),
        )


def soak(faults: Faults, minutes: float) -> dict[str, float]:
    """Do that until the time is over; what has grown, by name."""
    until = time.monotonic() + 60 * minutes
    with faults.start() as server:
        server.ready()
        while time.monotonic() < until:
            for _ in range(ROUND):
                _act(faults, server)
            faults.check("idle", server.is_idle(), "requests or memory are left")
            faults.sample(server)
            print(json.dumps(faults.rows[-1]), flush=True)
        said = server.errors()
        faults.check("nothing unexpected", "Traceback" not in said and "unexpected" not in said,
                     said[-600:])  # fmt: skip
    quarter = max(1, len(faults.rows) // 4)
    grown = {}
    for name, most in MOST_GROWN.items():
        values = [row[name] for row in faults.rows]
        second, last = values[quarter : 2 * quarter], values[-quarter:]
        grown[name] = statistics.median(last) - statistics.median(second)
        faults.check(f"{name} stays flat", grown[name] <= most, grown[name])
    return grown


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prepare()
    result = Result.begin("server-soak", [], {"minutes": given.minutes}, seed=given.seed)
    result.command = f"python -m tests.server.soak --minutes {given.minutes} --seed {given.seed}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        faults = Faults(given.seed, Path(name), "in memory")
        grown = soak(faults, given.minutes)
        faults.close()
    result.figures |= {
        "grown": grown, "wrong": faults.wrong, "counts": dict(faults.counts),
        "samples": faults.rows,
    }  # fmt: skip
    if given.out is not None:
        result.save(given.out)
    print(json.dumps({"grown": grown, "wrong": faults.wrong, "counts": faults.counts}))
    return 1 if faults.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
