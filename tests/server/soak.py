"""One server that talks, reads documents and loses clients for hours: what it holds stays flat.

    python -m tests.server.soak --minutes 60 --output FILE

Not part of the suite. The exit status is 1 where a promise was broken or something has grown.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result, public_arguments
from penstock.evaluate.sitting import Sitting, closed, say
from tests.server.faults import Faults
from tests.server.server_process import STAGES, ServerProcess, prepare

MOST_GROWN = {"memory_mib": 16.0, "malloc_mib": 2.0, "python_blocks": 20_000.0, "threads": 4.0}
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


def grown(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """How much each of `MOST_GROWN` has."""
    quarter = max(1, len(rows) // 4)
    found = {}
    for name in MOST_GROWN:
        values = [row[name] for row in rows if name in row]  # malloc counts with glibc alone
        if values:
            second, last = values[quarter : 2 * quarter] or values[:1], values[-quarter:]
            found[name] = statistics.median(last) - statistics.median(second)
    return found


def soak(faults: Faults, sitting: Sitting) -> None:
    """Do that until the time is over."""

    def figures() -> dict[str, object]:
        return {
            "grown": grown(faults.rows), "wrong": faults.wrong, "counts": dict(faults.counts),
            "samples": faults.rows,
        }  # fmt: skip

    with faults.start() as server:
        server.ready()
        while not sitting.time_is_up():
            for _ in range(ROUND):
                _act(faults, server)
            faults.settle(server)
            faults.sample(server)
            sitting.keep(figures())
            say(f"{faults.rows[-1]}")
        while faults.documents:
            faults.delete(server)
        faults.sample(server)  # no descriptor is left
        said = server.errors()
        faults.check("nothing unexpected", "Traceback" not in said and "unexpected" not in said,
                     said[-600:])  # fmt: skip
    for name, value in grown(faults.rows).items():
        faults.check(f"{name} stays flat", value <= MOST_GROWN[name], value)
    sitting.keep(figures())


def run(arguments: Sequence[str]) -> None:
    """Run it.

    Raises:
        PenstockError: bad arguments, or promises that were broken.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak", description=__doc__)
    args = read_options(parser, arguments, resume=False)
    args.minutes = 60.0 if args.minutes is None else args.minutes
    result = Result.begin("server-soak", [], {"minutes": args.minutes}, seed=args.seed)
    result.command = f"python -m tests.server.soak {public_arguments(arguments)}"
    prepare()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        contextlib.closing(Faults(str(args.seed), Path(name), "in memory")) as faults,
    ):
        soak(faults, Sitting(result, args))
    closed(result, args, f"{result.figures['grown']}, {faults.counts}")
    if faults.wrong:
        raise PenstockError(f"{len(faults.wrong)} promises were broken: {faults.wrong[0]}")


if __name__ == "__main__":
    run_program(run)
