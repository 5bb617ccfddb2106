"""AnswerStream: answers as an iterator, made by a thread of its own while it is read."""

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

from penstock.generation.output import RequestOutput, StreamedOutput

_POLL_S = 0.1
"""How long a wait for the next token may hold back Ctrl-C on systems whose locks cannot be
interrupted."""


class Closed(Exception):
    """The stream was closed; ends the run from inside."""


class _Run:
    """What the thread and the stream share. It does not know the stream, so that a stream that is
    forgotten is closed."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[StreamedOutput | None] = queue.SimpleQueue()
        self.is_closed = threading.Event()
        self.outputs: list[RequestOutput] | None = None
        self.error: BaseException | None = None

    def check(self) -> None:
        """Called between steps and chunks."""
        if self.is_closed.is_set():
            raise Closed

    def main(self, run: "Generate") -> None:
        """Run to the end, or until the stream is closed."""
        try:
            self.outputs = run(self.news.put, self.check)
        except Closed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.news.put(None)


Generate: TypeAlias = Callable[
    [Callable[[StreamedOutput], None], Callable[[], None]], list[RequestOutput]
]
"""Makes all answers: calls the first function with each piece, the second between steps."""


class AnswerStream(Iterator[StreamedOutput]):
    """What is new of answers, as it comes; made by `LLM.stream`.

    Closing it ends the run after the step or chunk under way, and frees the cache; so does leaving
    its `with`, and forgetting it. An error of the run is raised by the `next` that it comes up in.
    """

    def __init__(self, generate: Generate) -> None:
        """Start the run."""
        self._run = _Run()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run.main, generate), name="penstock-stream", daemon=True
        )
        # Also runs when Python ends, before a daemon thread is cut off inside a forward pass.
        self._close = weakref.finalize(self, _end, self._run, self._thread)
        self._thread.start()

    def __iter__(self) -> "AnswerStream":
        return self

    def __next__(self) -> StreamedOutput:
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> StreamedOutput:
        while self._close.alive:
            try:
                news = self._run.news.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if news is not None:
                return news
            self._thread.join()
            self._close.detach()
            if self._run.error is not None:
                raise self._run.error
        raise StopIteration

    @property
    def outputs(self) -> list[RequestOutput] | None:
        """The whole answers, as `LLM.generate` returns them; None until the stream has ended by
        itself."""
        return None if self._close.alive else self._run.outputs

    def close(self) -> None:
        """End the run, and wait until its cache is freed. A second call does nothing."""
        self._close()

    def __enter__(self) -> "AnswerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(run: _Run, thread: threading.Thread) -> None:
    run.is_closed.set()
    if thread is not threading.current_thread():  # which the garbage collector may run in
        thread.join()
