"""verify(): check one document with progress, say what is damaged, and mend it if wanted."""

import contextlib
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from penstock.cli.console import PlainConsole
from penstock.cli.doc_options import load_model_of
from penstock.cli.doc_screen import RepairProgress
from penstock.core.byte_size import format_bytes
from penstock.core.errors import DocumentDamagedError, DocumentFormatError

if TYPE_CHECKING:
    from penstock.documents.document_library import DocumentLibrary
    from penstock.storage.documents import Damage

_STEPS_IN_A_PIPE = 10
_MOST_UNITS = 8


class CheckProgress:
    """Progress of a check through bytes: a live bar with rate and ETA, ten lines in a pipe."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._started_s, self._shown = time.perf_counter(), 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(what, markup=False), BarColumn(bar_width=32),
                TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}"),
                console=console, transient=True,
            )  # fmt: skip
            self._bar.add_task(what, total=None, figures="")

    def __enter__(self) -> "CheckProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Show that so many bytes are through."""
        if not done:
            return
        gone_s = max(time.perf_counter() - self._started_s, 1e-6)
        left_s = gone_s * (total - done) / done
        figures = (
            f"{format_bytes(done)} of {format_bytes(total)}  {format_bytes(done / gone_s)}/s  "
            f"ETA {left_s:.0f} s"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, figures=figures)
            return
        step = done * _STEPS_IN_A_PIPE // max(total, 1)
        if step > self._shown:
            self._shown = step
            self._console.print(
                f"{self._what} {100 * done // total:>3} %  {figures}", soft_wrap=True
            )


def verify(
    shelf: "DocumentLibrary",
    name: str,
    *,
    repair: bool,
    model: str | None,
    device: str,
    dtype: str | None,
) -> bool:
    """Check a document; returns whether it is sound now."""
    from penstock.documents.contents import About, needed, read_groups
    from penstock.storage.documents import StoredDocument

    console = PlainConsole(stderr=True)
    folder = shelf.documents.find(name)
    try:
        stored = StoredDocument.open(folder, key=shelf.settings.key)
    except (DocumentDamagedError, DocumentFormatError) as error:
        console.print(f"{name}: {error}", soft_wrap=True)
        lacks_units = isinstance(error, DocumentDamagedError) and error.what.startswith("kv-")
        if not (repair and lacks_units):
            return False  # on to the next
        return _repair(shelf, name, console, model=model, device=device, dtype=dtype)
    started_s = time.perf_counter()
    with stored:
        total = 0

        def note(done: int, of: int) -> None:
            nonlocal total
            total = of
            progress.update(done, of)

        with CheckProgress(console, f"verify {name}") as progress:
            damage = stored.verify(note)
        with contextlib.suppress(DocumentDamagedError):
            damage = needed(damage, read_groups(stored, About.of(stored).num_groups))
    gone_s = time.perf_counter() - started_s
    if not damage:
        rate = format_bytes(total / max(gone_s, 1e-6))
        console.print(f"{name}: sound, {format_bytes(total)} read at {rate}/s", soft_wrap=True)
        return True
    for line in _lines(damage):
        console.print(f"{name}: {line}", soft_wrap=True)
    if not repair:
        console.print(
            f"{name}: damaged; asking mends what it meets, penstock doc verify --repair {name} "
            "mends all",
            soft_wrap=True,
        )
        return False
    return _repair(shelf, name, console, model=model, device=device, dtype=dtype)


def _repair(
    shelf: "DocumentLibrary", name: str, console: Console, *, model: str | None, device: str,
    dtype: str | None,
) -> bool:  # fmt: skip
    _, loaded = load_model_of(shelf, name, model, console, device=device, dtype=dtype)
    with (
        shelf.open(name, loaded, asks=False) as document,
        RepairProgress(console) as progress,
    ):
        recovery = document.recover(on_tokens=progress.update)
        console.print(f"{name}: {recovery}", soft_wrap=True)
        return not document.verify()


def _lines(damage: "Damage") -> list[str]:
    lines = []
    for layer, units in damage.units.items():
        shown = ", ".join(map(str, units[:_MOST_UNITS]))
        more = f" and {len(units) - _MOST_UNITS} more" if len(units) > _MOST_UNITS else ""
        lines.append(f"layer {layer}: damaged unit{'s' * (len(units) > 1)} {shown}{more}")
    lines += [f"damaged {blob}" for blob in damage.blobs]
    return [*lines, "damaged checksums"] if damage.seals else lines
