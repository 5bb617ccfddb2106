"""`python -m research.replicas`: replicas that keep to documents, beside one and beside any.

Each way starts `penstock serve` anew over the same stored documents; clients talk about them. In
the way "killed" a replica is killed when half of the questions are answered.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import ConfigError, StorageError
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed, say
from penstock.evaluate.text_table import format_table
from research.replicas.clients import Crowd, Row, Talk, summed, talks_of
from research.replicas.served import Served
from research.verified.program import begun, text_of

WAYS = ("affine", "random", "one", "plain", "killed")
"""To the document's replica; to any; --replicas 1; without Ray; as the first, and one is killed."""

COUNTED = ("queries", "hits")
"""Requests that named a document, and those whose replica had it open."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.replicas", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--replicas", type=int, default=3)
    add("--documents", type=int, default=300)
    add("--chars", type=int, default=8000, help="of a document")
    add("--questions", type=int, default=2000)
    add("--clients", type=int, default=32)
    add("--skew", type=float, default=1.0, help="of the documents' popularity (Zipf)")
    add("--answer", type=int, default=16, help="most tokens of each answer")
    add("--memory", default="512MiB", help="of each replica")
    add("--running", type=int, default=8, help="most requests of a replica at a time")
    add("--disk", default="auto", help="folder of documents, conversations and caches")
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    counts = (args.replicas, args.documents, args.chars, args.questions, args.clients)
    if min(*counts, args.answer, args.running) < 1:
        raise ConfigError("all numbers are at least 1")
    return args


def texts_of(text: str, count: int, chars: int) -> list[str]:
    """Parts of a text, from places at equal distances.

    Raises:
        ConfigError: the text is too short to tell them apart.
    """
    step = (len(text) - chars) // count
    if step < 1:
        raise ConfigError(f"the text has {len(text):,} characters; give more --text")
    return [text[at * step : at * step + chars] for at in range(count)]


def options_of(way: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """Of `penstock serve`; conversations are apart for each way."""
    sessions = folder / f"sessions-{way}"
    sessions.mkdir()
    found = [
        args.model, "--memory", args.memory, "--max-running", str(args.running),
        "--max-waiting", str(4 * args.clients), "--disk", str(folder),
        "--library", str(folder / "library"), "--sessions", str(sessions), "--max-disk", "64GiB",
    ]  # fmt: skip
    if way != "plain":
        found += ["--replicas", str(1 if way == "one" else args.replicas)]
    return [*found, "--at-random"] if way == "random" else found


def stored(served: Served, texts: Sequence[str]) -> list[int]:
    """Have all documents read, and return how many tokens each has.

    Raises:
        StorageError: one was not read.
    """
    tokens = []
    for number, text in enumerate(texts):
        name = f"d{number}"
        status, said, _ = served.ask("/v1/documents", {"name": name, "text": text})
        if status != 201:
            raise StorageError(f"document {number} was not read: {said}")
        tokens.append(int(said["tokens"]))
    return tokens


def known(served: Served, count: int) -> list[int]:
    """Tokens of each document that is stored already; [] where not all are."""
    _, said, _ = served.ask("/v1/documents")
    found = {each["id"]: int(each["tokens"]) for each in said["data"] if "tokens" in each}
    names = [f"d{number}" for number in range(count)]
    return [found[name] for name in names] if set(names) <= set(found) else []


def measure(
    way: str, args: argparse.Namespace, folder: Path, texts: Sequence[str], talks: Sequence[Talk]
) -> Row:
    """One way."""
    with Served(options_of(way, args, folder), folder / f"said-{way}") as served:
        tokens = known(served, len(texts)) or stored(served, texts)
        before = {name: served.counts(f"penstock:document_{name}_total") for name in COUNTED}
        crowd, killed = Crowd(served, talks, args.answer), Row()

        def kill() -> None:
            open_now = served.counts("penstock:replica_open_requests")
            victim = max(open_now, key=lambda name: open_now[name])
            served.kill(victim)
            killed.update({"replica": victim, "open_requests": open_now[victim]})

        seconds = crowd.run(args.clients, kill if way == "killed" else None)
        row = {"way": way, **summed(crowd.seen, seconds, tokens)}
        for name in COUNTED:
            now = served.counts(f"penstock:document_{name}_total")
            row[f"document_{name}"] = sum(now.values()) - sum(before[name].values())
    if killed:
        row["killed"] = killed
        del row["document_queries"], row["document_hits"]  # the killed one's are gone
    return row


def table(figures: Row) -> str:
    """A line for each way."""
    cells = []
    for row in figures["rows"]:
        asked = row.get("document_queries")
        hits = f"{100 * row['document_hits'] / asked:.0f} %" if asked else ""
        cells.append([
            row["way"], f"{row['questions_per_s']:.2f}", f"{row['p50_s']:.2f} / {row['p99_s']:.2f}",
            hits, f"{row['answered']}/{row['questions']}", f"{row['lost']}", f"{row['spilled']}",
            f"{row['went_on']}/{row['later_turns']}",
        ])  # fmt: skip
    header = [
        "way", "questions/s", "s, p50 / p99", "open", "answered", "lost", "spilled", "went on",
    ]  # fmt: skip
    head = (
        f"{figures['model']}, {figures['documents']} documents of {figures['chars']} characters, "
        f"{figures['clients']} clients, {figures['replicas']} replicas"
    )
    return f"{head}\n{format_table(header, cells)}"


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, save the result.

    Raises:
        PenstockError: bad input, a server that does not start, or a document that is not read.
    """
    args = parse_arguments(arguments)
    result = begun("replicas", arguments, args)
    sitting = Sitting(result, args)
    texts = texts_of(text_of(args.text or []), args.documents, args.chars)
    talks = talks_of(texts, args.questions, args.skew, seed=0)
    rows: list[Row] = []
    figures: Row = {
        "model": Path(args.model).name, "documents": args.documents, "chars": args.chars,
        "clients": args.clients, "replicas": args.replicas, "rows": rows,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=None if args.disk == "auto" else args.disk) as name:
        folder = Path(name)
        (folder / "library").mkdir()
        for way in args.ways:
            say(way)
            rows.append(measure(way, args, folder, texts, talks))
            sitting.keep(figures)
    return closed(result, args, table(figures))
