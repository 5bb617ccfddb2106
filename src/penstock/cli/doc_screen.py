"""Screens of `penstock doc`: adding, the answers, and what a repair prefills again."""

from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console

from penstock.cli.console import for_reader
from penstock.cli.screen import LateProgress, TokenProgress


class AnswersScreen:
    """The answers as they come, on `out` alone; with several, each behind its question.

    Args:
        console: where the questions go.
        out: where the answers go, a line each, or None to show nothing.
    """

    def __init__(self, console: Console, out: TextIO | None, questions: Sequence[str]) -> None:
        self._console, self._out, self._questions = console, out, questions
        self._newest = -1

    def __enter__(self) -> "AnswersScreen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._begin(len(self._questions))  # the last ones may be empty
        elif self._newest >= 0:
            self._end_line()

    def on_text(self, number: int, piece: str) -> None:
        """For `Document.ask(on_text=...)`."""
        if self._out is not None:
            self._begin(number)
            self._out.write(for_reader(piece, self._out))
            self._out.flush()

    def _begin(self, number: int) -> None:
        """End the answers in front of this one, and put its question."""
        while self._newest < number and self._out is not None:
            if self._newest >= 0:
                self._end_line()
            self._newest += 1
            if 1 < len(self._questions) > self._newest:
                question = self._questions[self._newest]
                self._console.print(question, style="bold", markup=False, soft_wrap=True)

    def _end_line(self) -> None:
        if self._out is not None:
            self._out.write("\n")
            self._out.flush()


class AddProgress:
    """Progress of `penstock doc add`: prefill, then storing once it turns out to take a while.

    A context manager, at whose end no bar is left.
    """

    def __init__(self, console: Console) -> None:
        self._prefill = TokenProgress(console)
        self._store = LateProgress(console, "store")

    def __enter__(self) -> "AddProgress":
        self._prefill.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._prefill.stop()
        self._store.stop()

    def on_tokens(self, done: int, total: int) -> None:
        """For `DocumentLibrary.add(on_tokens=...)`."""
        self._prefill.update(done, total)

    def on_bytes(self, done: int, total: int) -> None:
        """For `DocumentLibrary.add(on_bytes=...)`."""
        self._prefill.stop()  # a terminal has one live bar
        self._store.update(done / max(total, 1))


class RepairProgress:
    """Progress through what is prefilled again; nothing is shown as long as nothing is.

    A context manager, at whose end no bar is left.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: TokenProgress | None = None

    def __enter__(self) -> "RepairProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def update(self, done: int, total: int) -> None:
        """For `Document.ask(on_tokens=...)` and `recover`."""
        if self._progress is None:
            tokens = "1 token is" if total == 1 else f"{total:,} tokens are"
            self._console.print(f"damage was found: {tokens} prefilled again", soft_wrap=True)
            self._progress = TokenProgress(self._console, "prefill again")
            self._progress.__enter__()
        if done:
            self._progress.update(done, total)
        if done >= total:
            self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
