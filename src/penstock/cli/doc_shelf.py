"""`penstock doc ls|show|verify|rm|gc|key`: what is in a library, and keeping it in order."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from penstock.cli.console import PlainConsole, say
from penstock.cli.doc_options import (
    KeyOption,
    LibraryOption,
    NameArgument,
    key_of,
    open_library,
    open_shelf,
)
from penstock.cli.options import DeviceOption, DtypeOption, JsonOption
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes

if TYPE_CHECKING:
    from penstock.storage.documents.document_library import Entry
    from penstock.storage.documents.quota import LibrarySettings
    from penstock.storage.documents.write_budget import WriteBudget

_EXIT_DAMAGED = 1
_STATES = ("ready", "unfinished")
"""Of documents that need no more said; see `Entry.state`."""


def list_command(
    library: LibraryOption = None, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List the documents, what they take, and what was written today."""
    found = open_library(library)
    entries = found.entries(key_of(key))
    settings, writes = found.settings, found.write_budget
    if as_json:
        typer.echo(
            json.dumps({
                "documents": [asdict(entry) for entry in entries],
                "size_bytes": sum(entry.size_bytes for entry in entries),
                "max_disk_bytes": settings.max_disk_bytes,
                "written_today_bytes": writes.today_bytes,
                "written_bytes": writes.total_bytes,
                "writes_per_day_bytes": settings.writes_per_day_bytes,
            })
        )  # fmt: skip
        return
    console = PlainConsole()
    if not entries:
        console.print(
            f"no documents in {found.root}; penstock doc add MODEL FILE --name NAME stores one",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    else:
        print_table(console, _table(entries))
        for entry in entries:
            if entry.state not in _STATES:
                console.print(f"{entry.name}: {entry.state}", markup=False, soft_wrap=True)
    console.print(_limits(writes, settings, entries), markup=False, soft_wrap=True)
    if writes.notice:
        console.print(Text.assemble(("note: ", "bold yellow"), writes.notice), soft_wrap=True)


def _table(entries: "list[Entry]") -> Table:
    table = Table(box=SIMPLE_HEAD, border_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    for title in ("tokens", "on disk"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("asked", justify="right", no_wrap=True)
    table.add_column("last", no_wrap=True)
    table.add_column("", overflow="fold")
    for entry in entries:
        marks = ["encrypted"] if entry.encrypted else []
        if entry.state != "ready":
            marks.append(entry.state.partition(":")[0])
        table.add_row(
            entry.name, "" if entry.tokens is None else f"{entry.tokens:,}",
            format_bytes(entry.size_bytes), entry.model or "", str(entry.asks),
            _when(entry.last_asked), Text(", ".join(marks), style="dim"),
        )  # fmt: skip
    return table


def _when(epoch_s: float | None) -> str:
    if epoch_s is None:
        return "never"
    return datetime.fromtimestamp(epoch_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def _limits(writes: "WriteBudget", settings: "LibrarySettings", entries: "list[Entry]") -> str:
    held = format_bytes(sum(entry.size_bytes for entry in entries))
    room, day = (
        f" of {format_bytes(limit)}" if limit else ""
        for limit in (settings.max_disk_bytes, settings.writes_per_day_bytes)
    )
    return (
        f"{held}{room} on disk, {format_bytes(writes.today_bytes)}{day} written today (UTC), "
        f"{format_bytes(writes.total_bytes)} ever"
    )


def show_command(
    name: NameArgument, library: LibraryOption = None, key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show what a document says of itself; reads its manifest alone."""
    from penstock.storage.documents import read_summary

    found, secret = open_library(library), key_of(key)
    folder = found.find(name)
    summary = read_summary(folder, secret)
    entry = next(entry for entry in found.entries(secret) if entry.name == name)
    about, identity = dict(summary.about or {}), dict(summary.identity or {})
    if as_json:
        typer.echo(json.dumps({
            **asdict(entry), "document_id": summary.document_id, "about": about,
            "identity": identity,
        }))  # fmt: skip
        return
    data, side = format_bytes(summary.data_bytes), format_bytes(summary.side_bytes)
    rows = {
        "folder": str(folder),
        "title": about.get("title"),
        "model": about.get("model"),
        "tokens": None if entry.tokens is None else f"{entry.tokens:,}",
        "policy": _policy(about),
        "added": _when(entry.created),
        "asked": f"{_times(entry.asks)}, last {_when(entry.last_asked)}" if entry.asks else "never",
        "on disk": f"{format_bytes(entry.size_bytes)}: keys and values {data}, the rest {side}",
        "written": f"{format_bytes(entry.written_bytes)}, committed {_times(summary.generation)}",
        "units": f"{summary.num_units:,} of {format_bytes(summary.shape.unit_bytes)} in each of "
        f"{summary.shape.layers} layers",
        "encrypted": "yes" if summary.encrypted else "no",
        **identity,
    }
    table = Table(show_header=False, border_style="dim")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, figure in rows.items():
        if figure:
            table.add_row(what, str(figure))
    print_table(PlainConsole(), table)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _policy(about: dict[str, object]) -> str:
    fields = about.get("policy_fields")
    chosen = fields.items() if isinstance(fields, dict) else ()
    return " ".join([str(about.get("policy", "")), *(f"{each}={value}" for each, value in chosen)])


def verify_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Stored documents.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Prefill what is damaged again, and store it.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="For --repair: the model, if it is somewhere else now.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --repair: as for add.")
    ] = None,
    library: LibraryOption = None, key: KeyOption = None, device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
) -> None:  # fmt: skip
    """Read and check all of a document; exits with 1 on damage."""
    from penstock.cli.doc_verify import verify

    sound = [
        verify(open_shelf(library, key, adapter=adapter), name, repair=repair,
               model=model, device=device, dtype=None if dtype is None else dtype.value)
        for name in names
    ]  # fmt: skip
    if not all(sound):
        raise typer.Exit(_EXIT_DAMAGED)


def remove_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Stored documents.")],
    library: LibraryOption = None,
) -> None:
    """Remove documents; an open one is refused."""
    found, names = open_library(library), list(dict.fromkeys(names))
    for name in names:  # all or none, for a mistyped one
        found.find(name)
    for name in names:
        found.remove(name)
        say(f"removed {name}")


def gc_command(library: LibraryOption = None) -> None:
    """Remove what interrupted commands left; documents stay."""
    done = open_library(library).collect_garbage()
    for name in done.removed:
        say(f"removed {name}, which was never finished")
    for name in done.stray_files:
        say(f"removed {name}")
    for name in done.busy:
        say(f"left {name}: somebody is writing it")
    for line in done.failed:
        say(f"could not remove {line}", err=True)
    for name in done.left_alone:
        say(f"left {name}: not a document")
    say(f"{format_bytes(done.freed_bytes)} freed")
    if done.failed:
        raise typer.Exit(1)


def key_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
) -> None:
    """Make a key; what is encrypted with it is lost without it."""
    from penstock.storage.documents.key_sources import make_key_file

    make_key_file(file)
    say(f"a new key is in {file}; keep a copy of it. Use it with --key file:{file}")
