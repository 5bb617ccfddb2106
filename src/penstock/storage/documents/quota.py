"""A library's limits: kept in a file of their own, and who has to go so that a document fits."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError, DocumentBusyError, StorageError, StoreFullError
from penstock.storage.documents.folder import is_own_name
from penstock.storage.documents.names import SETTINGS_FILE
from penstock.storage.documents.small_files import is_count, locked, read_object, replace_object

if TYPE_CHECKING:  # a library reads its own limits here
    from penstock.storage.documents.document_library import Entry, Library

_SHOWN_HOLDERS = 5


class LibrarySettings(NamedTuple):
    """Limits that hold for every command on a library."""

    max_disk_bytes: int | None = None
    """For all documents; None for no limit."""
    writes_per_day_bytes: int | None = None
    """Per UTC day; None for no limit."""


def read_settings(root: Path) -> LibrarySettings:
    """The limits that were last set.

    Raises:
        ConfigError: the file is damaged.
        StorageError: it cannot be read.
    """
    path = root / SETTINGS_FILE
    content, damage = read_object(path)
    values = {name: content.get(name) for name in LibrarySettings._fields}
    if damage is None and not all(map(_is_limit, values.values())):
        damage = "it does not hold limits"
    if damage is not None:
        raise ConfigError(f"{path} is damaged ({damage}); remove it, and set the limits again")
    return LibrarySettings(**values)


def write_settings(root: Path, settings: LibrarySettings) -> None:
    """Keep limits for every later command.

    Raises:
        ConfigError: a limit is not positive.
        StorageError: they cannot be written.
    """
    for name, value in settings._asdict().items():
        if not _is_limit(value):
            raise ConfigError(f"{name}={value} is no limit; give 1 byte or more, or None")
    with locked(root):
        replace_object(root / SETTINGS_FILE, settings._asdict(), sync=True)


def _is_limit(value: object) -> bool:
    return value is None or (is_count(value) and value > 0)


def check_room(
    library: "Library", need_bytes: int, max_disk_bytes: int | None, keep: Collection[str] = ()
) -> None:
    """Refuse what `make_room` could not make room for; removes nothing.

    Raises:
        StoreFullError, StorageError: as for `make_room`.
    """
    if max_disk_bytes is not None:
        _choose(library, need_bytes, max_disk_bytes, keep, {})


def make_room(
    library: "Library", need_bytes: int, max_disk_bytes: int | None, keep: Collection[str] = (),
    on_removed: Callable[[str], None] = lambda name: None,
) -> list[str]:  # fmt: skip
    """Remove documents, the least recently asked first, until `need_bytes` more fit.

    A document that was never asked counts from its creation. Documents that are open are passed
    over, and so are unreadable ones: another version, or a repair, may read them.

    Args:
        max_disk_bytes: for the whole library; None for no limit.
        keep: names that stay.
        on_removed: called with each name as soon as that document has gone.

    Returns:
        The names of what was removed, in that order.

    Raises:
        StoreFullError: it cannot be done; nothing was removed, unless a document was opened or
            began to grow just meanwhile.
        StorageError: the library cannot be read.
    """
    assert need_bytes >= 0, need_bytes
    if max_disk_bytes is None:
        return []
    evicted: list[str] = []
    stuck: dict[str, str] = {}
    while going := _choose(library, need_bytes, max_disk_bytes, keep, stuck):
        for name in going:
            try:
                library.remove(name)
                evicted.append(name)
                on_removed(name)
            except DocumentBusyError:
                stuck[name] = "in use"
            except StorageError:
                stuck[name] = "cannot be removed"
            except ConfigError:
                pass  # another process has removed it
    return evicted


def _choose(
    library: "Library", need_bytes: int, max_disk_bytes: int, keep: Collection[str],
    stuck: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """What goes, in order; nothing where there is room."""
    now = library.clock()
    entries = sorted(library.entries(), key=lambda each: (_asked(each, now), each.name))
    excess_bytes = sum(entry.size_bytes for entry in entries) + need_bytes - max_disk_bytes
    going: list[str] = []
    stays: dict[str, str] = {}
    for entry in entries:
        if excess_bytes <= 0:
            break
        reason = stuck.get(entry.name) or _why_it_stays(library, entry, keep)
        if reason is not None:
            stays[entry.name] = reason
        else:
            going.append(entry.name)
            excess_bytes -= entry.size_bytes
    if excess_bytes > 0:
        raise _full(library, entries, stays, need_bytes, max_disk_bytes)
    return going


def _asked(entry: "Entry", now: float) -> float:
    """When it was last wanted; a time that a wrong clock put ahead counts as now."""
    times = (entry.last_asked, entry.created, 0.0)
    return min(now, next(each for each in times if each is not None))


def _why_it_stays(library: "Library", entry: "Entry", keep: Collection[str]) -> str | None:
    """Why a document may not go, or None if it may."""
    if entry.name in keep:
        return "to be kept"
    if entry.state.startswith("unreadable"):
        return "unreadable"
    if library.is_open(entry.name):
        return "in use"
    try:
        is_all_ours = all(map(is_own_name, os.listdir(library.folder(entry.name))))
    except (ConfigError, OSError):  # gone, or no folder of ours any more
        is_all_ours = False
    return None if is_all_ours else "with files that are not ours"


def _full(
    library: "Library", entries: Sequence["Entry"], stays: Mapping[str, str],
    need_bytes: int, max_disk_bytes: int,
) -> StoreFullError:  # fmt: skip
    by_size = sorted(entries, key=lambda each: -each.size_bytes)
    shown = [
        f"{each.name} {format_bytes(each.size_bytes)}"
        + (f" ({stays[each.name]})" if each.name in stays else "")
        for each in by_size[:_SHOWN_HOLDERS]
    ]
    rest = by_size[_SHOWN_HOLDERS:]
    if rest:
        rest_bytes = sum(each.size_bytes for each in rest)
        shown.append(f"{len(rest)} more {format_bytes(rest_bytes)}")
    return StoreFullError(
        f"the library {library.root} has no room for {format_bytes(need_bytes)} in its "
        f"{format_bytes(max_disk_bytes)}: it holds {', '.join(shown) or 'nothing'}; remove a "
        "document, or raise the limit"
    )
