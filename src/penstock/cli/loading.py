"""Loading a model by name, with what a person sees of it: a bar, or ten lines in a pipe."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, Task, TextColumn
from rich.text import Text

from penstock.core.byte_size import format_bytes
from penstock.core.printable import printable

if TYPE_CHECKING:
    from penstock.models.loader import LoadedModel

_LINES_IN_A_PIPE = 10
_QUIET_S = 1.0
"""What is done sooner is not spoken of in a pipe."""


class ModelSource(NamedTuple):
    """Where a model of the hub may come from; see `penstock.load`."""

    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False


def load_model(
    console: Console, model: str, *, dtype: str | None, device: str, source: ModelSource,
    weights: str | None = None,
) -> "LoadedModel":  # fmt: skip
    """`penstock.load`, with its progress on the console."""
    from penstock.models.loader import load

    with loading(console, model) as progress:
        loaded = load(
            model, dtype=dtype, weights=weights, device=device, revision=source.revision,
            offline=source.offline or None, trust_remote_code=source.trust_remote_code,
            on_bytes=progress.update,
        )  # fmt: skip
    for notice in loaded.notices:
        console.print(f"note: {model}: {notice}", soft_wrap=True)
    return loaded


@contextmanager
def loading(console: Console, model: str) -> Iterator["BytesProgress"]:
    """Say on a terminal that a model is being loaded, and how far what is fetched has come."""
    with BytesProgress(console, f"loading {model}") as progress:
        yield progress


class BytesProgress:
    """Progress through bytes: a line on a terminal that is cleared, ten lines in a pipe.

    A context manager; what is told before the first bytes is a line on a terminal alone.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._began_s = 0.0
        self._told = ("", 0)
        self._bar: Progress | None = None

    def __enter__(self) -> "BytesProgress":
        self._began_s = time.perf_counter()
        if self._console.is_terminal:
            self._bar = _line(self._console)
            self._bar.add_task(printable(self._what), total=None)
            self._bar.add_task("", total=0, visible=False)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are through; `what` says of what."""
        if self._bar is not None:
            waiting, counted = self._bar.task_ids
            over = done >= total  # what comes next has no bytes to tell of
            self._bar.update(waiting, visible=over)
            self._bar.update(
                counted, description=printable(what), completed=done, total=total, visible=not over
            )
            return
        step = done * _LINES_IN_A_PIPE // max(total, 1)
        if (what, step) == self._told or step == 0:
            return
        self._told = (what, step)
        if time.perf_counter() - self._began_s > _QUIET_S:
            figures = f"{format_bytes(done)} of {format_bytes(total)}"
            self._console.print(f"{what} {100 * done // total:>3} %  {figures}", soft_wrap=True)


class _WhileCounted(DownloadColumn):
    """Bytes, where they are counted."""

    def render(self, task: Task) -> Text:
        """As `DownloadColumn.render`."""
        return super().render(task) if task.total else Text()


def _line(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
        _WhileCounted(binary_units=True), console=console, transient=True,
    )  # fmt: skip
