"""Served: one request on its way through an engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.closing import close_all
from penstock.core.ledger import Reservation
from penstock.core.stats import RunStats
from penstock.generation.batch_run import BatchRun, Listeners
from penstock.generation.batch_runner import BatchRunner
from penstock.generation.output import CompletionOutput, StreamedOutput
from penstock.generation.requests import Batch
from penstock.generation.serving.attended_shares import AttendedShares
from penstock.generation.serving.events import (
    Event,
    Failed,
    Finished,
    Prefill,
    Queued,
    Timings,
    Token,
    Usage,
)
from penstock.generation.serving.request import Request
from penstock.models.cache_adapter import TieredCache

Keeping: TypeAlias = Future[None]


@dataclass(slots=True)
class _Kept:
    """What a running request has of the engine's."""

    cache: TieredCache
    reservation: Reservation
    run: BatchRun
    chunks: Iterator[int]
    cached: int
    notices: tuple[str, ...]


class Served:
    """A request: waiting, then with a cache, then over. The engine's thread alone moves it."""

    def __init__(
        self, number: int, request: Request, batch: Batch, put: Callable[[Event], None]
    ) -> None:
        """Begin to wait.

        Args:
            number: counts up over the requests of an engine.
            batch: the prompt, encoded and checked.
            put: gets its events.
        """
        self.number, self.request, self.batch, self._put = number, request, batch, put
        self.is_cancelled = False
        """Set from any thread."""
        self.price: int | None = None
        """Fast memory that its cache wants, in bytes; None while that is not known."""
        self.deadline = 0
        """Lower ones are read first; in tokens that the engine has read."""
        self._read = 0
        self.has_begun_anew = False
        """A stored beginning was damaged."""
        self.keeping: Keeping | None = None
        """Set while its cache is stored behind the end."""
        self._submitted_s = time.monotonic()
        self._admitted_s = self._first_s = self._last_s = 0.0
        self._kept: _Kept | None = None
        self._attended: AttendedShares | None = None
        self.is_over = False

    @property
    def order(self) -> tuple[int, int]:
        """Lower ones are admitted first."""
        return self.request.priority, self.number

    def queued(self, position: int) -> None:
        """Say where it waits."""
        self._put(Queued(position=position))

    # With a cache -----------------------------------------------------------------------------

    def admit(
        self, runner: BatchRunner, cache: TieredCache, reservation: Reservation,
        notices: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Begin over a cache, which is its own from now on."""
        self._admitted_s = time.monotonic()
        run = runner.begin(self.batch, cache, Listeners(on_news=self._news))
        self._read = cached = cache.get_seq_length()
        self._kept = _Kept(cache, reservation, run, run.read(), cached, notices)
        if self.request.attended_parts:
            self._attended = AttendedShares(cache, self.request.attended_parts)
        self._put(self._progress(cached))

    @property
    def run(self) -> BatchRun:
        """Its answers in the making."""
        assert self._kept is not None
        return self._kept.run

    @property
    def cache(self) -> TieredCache:
        """That it runs over."""
        assert self._kept is not None
        return self._kept.cache

    @property
    def is_reading(self) -> bool:
        """Whether its first tokens are still to come."""
        return self._kept is None or not self._kept.run.tokens

    @property
    def unread_tokens(self) -> int:
        """Of the prompt, still to be read."""
        return self.batch.prompts.padded_tokens - self._read

    def read_chunk(self) -> None:
        """Read the next part of the prompt; behind the last one, choose the first tokens."""
        assert self._kept is not None
        done = next(self._kept.chunks, None)
        if done is not None:
            self._read = done
            self._put(self._progress(done))
            if done < self.batch.prompts.padded_tokens:
                return
            for _ in self._kept.chunks:  # the rest of it: a fork, the choice
                pass

    def _progress(self, done: int) -> Prefill:
        assert self._kept is not None
        return Prefill(
            processed=done, cached=self._kept.cached, total=self.batch.prompts.padded_tokens,
            time_s=time.monotonic() - self._admitted_s,
        )  # fmt: skip

    def _news(self, news: StreamedOutput) -> None:
        self._last_s = time.monotonic()
        self._first_s = self._first_s or self._last_s
        [new] = news.outputs
        self._put(
            Token(
                index=new.index, token_ids=new.token_ids, text=new.text, logprobs=new.logprobs,
                finish_reason=new.finish_reason, stop_reason=new.stop_reason,
            )
        )  # fmt: skip

    # The end ----------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        kept = self._kept
        return Usage(
            prompt_tokens=self.batch.prompts.padded_tokens,
            cached_tokens=0 if kept is None else kept.cached,
            new_tokens=0 if kept is None else kept.run.new_tokens,
        )

    def finish(self, keep: Callable[[Sequence[int], TieredCache], Keeping | None]) -> str:
        """Say that it is over, and give its memory back; what has not ended ends here.

        Args:
            keep: may go on reading the cache of a request with one answer that has ended; gets the
                tokens of prompt and answer.

        Returns:
            The reason of its first answer.
        """
        kept, run, outputs, prompt_logprobs = self._kept, None, [], None
        keeping: Keeping | None = None
        if kept is not None:
            is_whole = kept.run.is_done and kept.run.num_rows == 1
            kept.run.end()
            run = kept.run.report(kept.notices, restored=kept.cached, recomputed=0)
            [made] = kept.run.outputs(run)
            outputs, prompt_logprobs = made.outputs, made.prompt_logprobs
            if is_whole:
                keeping = keep([*made.prompt_token_ids, *made.token_ids], kept.cache)
        else:
            outputs = [
                CompletionOutput(index=i, text="", token_ids=[], finish_reason="abort")
                for i in range(self.batch.requests[0].params.n)
            ]
        end = Finished(
            outputs=outputs, usage=self.usage, timings=self._timings(), run=run,
            prompt_logprobs=prompt_logprobs,
            attended=None if self._attended is None else self._attended.shares,
        )  # fmt: skip
        if keeping is None:
            self.give_back()
        else:
            self.is_over = True
            self.keeping = keeping
        self._put(end)
        return end.reason

    def fail(self, error: BaseException) -> None:
        """Say what it failed of, and give its memory back."""
        try:
            self.give_back()
        finally:
            self._put(Failed(error=error))

    @property
    def stats(self) -> RunStats | None:
        """Of its cache, if it has one."""
        return None if self._kept is None else self._kept.cache.stats

    def begin_anew(self) -> None:
        """Give its memory back, and wait again: no token of its answer is made."""
        self.has_begun_anew = True
        self.give_back()
        self.is_over, self.price, self._read = False, None, 0

    def give_back(self) -> None:
        """Give its memory back."""
        self.is_over = True
        kept, self._kept = self._kept, None
        if kept is not None:
            close_all(kept.cache.close, kept.reservation.release)

    def _timings(self) -> Timings:
        now = time.monotonic()
        admitted = self._admitted_s or now
        first = self._first_s or now
        return Timings(
            queue_s=admitted - self._submitted_s, prefill_s=first - admitted,
            decode_s=(self._last_s or first) - first, total_s=now - self._submitted_s,
        )  # fmt: skip
