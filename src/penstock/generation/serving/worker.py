"""Worker: the thread of an engine: admits, reads prompts in turns, and steps who decodes."""

import bisect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.core.errors import CacheStateError, DocumentDamagedError, QueueFullError
from penstock.generation.batch_runner import BatchRunner
from penstock.generation.prompts import visuals_in
from penstock.generation.serving.admission import Admission
from penstock.generation.serving.request import StoredBeginnings
from penstock.generation.serving.served import Keeping, Served
from penstock.generation.serving.stats import EngineStats
from penstock.generation.serving.steps import Steps
from penstock.models.cache_adapter import TieredCache

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
"""How long a wait may hold back a Ctrl-C on systems whose locks cannot be interrupted."""


class Worker:
    """All requests of an engine and the thread that moves them; knows no `Engine`, so that one that
    is forgotten is closed.

    Between two steps of those who decode, one chunk of one prompt is read: of the one that would be
    done first if each had been read at once. So a short prompt does not wait for a long one, and a
    long one waits for no more than came before its end would have.
    """

    def __init__(
        self, runner: BatchRunner, admission: Admission, max_running: int, max_waiting: int,
        sessions: StoredBeginnings | None = None,
    ) -> None:  # fmt: skip
        """Start the thread."""
        self._sessions, self._storing = sessions, list[Served]()
        self._runner, self._admission = runner, admission
        self._max_running, self._max_waiting = max_running, max_waiting
        self._changed = threading.Condition()
        self._waiting: list[Served] = []
        self._reading: list[Served] = []
        self._tokens_read = 0
        self._decoding: list[Served] = []
        self._is_closing = self._is_closed = False
        self._error: BaseException | None = None
        self._stats = EngineStats()
        self._steps = Steps(runner.loaded.model)
        self._seconds_each = 0.0
        self.thread = threading.Thread(target=self._main, name="penstock-engine", daemon=True)
        self.thread.start()

    # From any thread --------------------------------------------------------------------------

    def submit(self, served: Served) -> None:
        """Let a request wait.

        Raises:
            QueueFullError: as many wait as may.
            CacheStateError: closed.
        """
        with self._changed:
            if self._is_closing:
                raise CacheStateError("the engine is closed") from self._error
            # Those that will be admitted before the next step do not wait.
            busy = len(self._decoding) + len(self._reading)
            most = self._max_waiting + max(0, self._max_running - busy)
            if len(self._waiting) >= most:
                self._stats.refused += 1
                after = max(1.0, self._seconds_each)
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait already; ask again in {after:.0f} s",
                    retry_after_s=after,
                )
            self._stats.submitted += 1
            served.queued(self._wait(served))
            self._changed.notify_all()

    def _wait(self, served: Served) -> int:
        """Put a request in its place among those that wait; which that is. Under the lock."""
        place = bisect.bisect([each.order for each in self._waiting], served.order)
        self._waiting.insert(place, served)
        return place

    def wake(self) -> None:
        """A request was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def stop(self, *, abort: bool) -> None:
        """Take no more requests.

        Args:
            abort: cancel those that are there.
        """
        with self._changed:
            self._is_closing = True
            if abort:
                for each in (*self._waiting, *self._reading, *self._decoding):
                    each.is_cancelled = True
            self._changed.notify_all()

    @property
    def error(self) -> BaseException | None:
        """What has ended the thread, if it was not `stop`."""
        return self._error

    def stats(self) -> EngineStats:
        """What it does and has done."""
        with self._changed:
            ledger = self._admission.ledger
            return replace(
                self._stats, finished=dict(self._stats.finished), waiting=len(self._waiting),
                running=len(self._reading) + len(self._decoding), prefilling=len(self._reading),
                used_bytes=ledger.used_bytes, peak_bytes=ledger.peak_bytes,
                limit_bytes=ledger.limit_bytes,
            )  # fmt: skip

    # The thread -------------------------------------------------------------------------------

    @torch.no_grad()
    def _main(self) -> None:
        try:
            while self._await_work():
                self._end_cancelled()
                self._end_stored()
                self._admit()
                self._read_chunk()
                self._decode()
        except BaseException as error:
            self._error = error
            _LOG.error("the engine failed: %s", error, exc_info=error)
        finally:
            with self._changed:
                self._is_closing = self._is_closed = True
                left = (*self._waiting, *self._reading, *self._decoding)
                self._waiting.clear()
                self._reading.clear()
                self._decoding.clear()
            self._steps.close()
            for each in self._storing:
                self._try(each, each.give_back)
            for each in left:
                each.fail(self._error or CacheStateError("the engine is closed"))

    def _await_work(self) -> bool:
        """Whether there is something to do; false when the engine is closed and all is done."""
        with self._changed:
            while not (self._waiting or self._reading or self._decoding):
                if self._storing:
                    break
                if self._is_closing:
                    return False
                self._changed.wait(_IDLE_S)
            if not (self._reading or self._decoding) and self._storing:
                keeping = self._storing[0].keeping
                self._changed.wait_for(
                    lambda: (
                        keeping is None
                        or keeping.done()
                        or not all(map(self._awaits_write, self._waiting))
                    ),
                    _IDLE_S,
                )
        return True

    def _end_stored(self) -> None:
        """Give back the memory of requests whose caches have been stored."""
        for served in [*self._storing]:
            if served.keeping is None or served.keeping.done():
                self._storing.remove(served)
                self._try(served, served.give_back)

    def _keep(self, served: Served, tokens: Sequence[int], cache: TieredCache) -> Keeping | None:
        """Let a cache be stored that has answered."""
        if self._sessions is None or visuals_in(served.batch.prompts.token_ids[0]):
            return None
        request = served.request
        keeping = self._sessions.keep(request.cache_salt, tokens, cache, behind=request.document)
        if keeping is not None:
            self._storing.append(served)
            keeping.add_done_callback(lambda _: self.wake())
        return keeping

    def _end_cancelled(self) -> None:
        with self._changed:
            every = (*self._waiting, *self._reading, *self._decoding)
            cancelled = [each for each in every if each.is_cancelled]
        for each in cancelled:
            self._finish(each)

    def _admit(self) -> None:
        """Give caches to those who wait, in order, as far as the memory goes."""
        while True:
            with self._changed:
                busy = len(self._reading) + len(self._decoding)
                first = next((each for each in self._waiting if not self._awaits_write(each)), None)
                if first is None or busy >= self._max_running:
                    return
            if not self._try(first, partial(self._admit_one, first)):
                return

    def _awaits_write(self, served: Served) -> bool:
        """Whether it may begin with what is being stored; others do not wait for that."""
        request, sessions = served.request, self._sessions
        return sessions is not None and sessions.is_storing(
            request.cache_salt, behind=request.document
        )

    def _admit_one(self, served: Served) -> bool:
        """Whether the next one may be tried."""
        admission = self._admission
        if served.price is not None and served.price > admission.ledger.free_bytes:
            return False
        cache, notices = admission.open(served.request, served.batch)
        served.price = admission.price(cache)
        reservation = admission.book(cache)
        if reservation is None:
            cache.close()
            return False
        with self._changed:
            self._waiting.remove(served)
            self._reading.append(served)
        served.admit(self._runner, cache, reservation, notices)
        served.deadline = self._tokens_read + served.unread_tokens
        return True

    def _read_chunk(self) -> None:
        if not self._reading:
            return
        served = min(self._reading, key=lambda each: each.deadline)
        before = served.unread_tokens
        self._try(served, partial(self._read_part, served))
        with self._changed:
            self._stats.chunks += 1
        if served not in self._reading and not served.is_over:
            return
        self._tokens_read += before if served.is_over else before - served.unread_tokens
        if served.is_over or served.is_reading:
            return
        with self._changed:
            self._reading.remove(served)
            self._decoding.append(served)
            self._stats.prompt_tokens += served.usage.prompt_tokens
            self._stats.cached_tokens += served.usage.cached_tokens
        if served.run.is_done:
            self._finish(served)

    def _read_part(self, served: Served) -> None:
        """The next part of a prompt; behind a stored beginning that is damaged, all of it anew."""
        try:
            served.read_chunk()
        except DocumentDamagedError as error:
            if served.request.document is not None or served.has_begun_anew:
                raise
            _LOG.warning("a prompt is read anew: %s", error)
            with self._changed:
                self._reading.remove(served)
                served.begin_anew()
                self._wait(served)

    def _decode(self) -> None:
        """One step of everyone who decodes."""
        if self._runner.verify is not None:
            for served in [*self._decoding]:
                self._try(served, served.run.decode)
        elif self._decoding:
            self._step([*self._decoding])
        for served in [each for each in self._decoding if each.run.is_done]:
            self._finish(served)

    def _step(self, every: list[Served]) -> None:
        found = self._steps(
            [served.cache for served in every], [served.run.tokens for served in every]
        )
        with self._changed:
            self._stats.steps, self._stats.joint_steps = self._steps.passes, self._steps.joint
            self._stats.step_rows += sum(served.run.num_rows for served in every)
        for served, logits in zip(every, found, strict=True):
            self._try(served, partial(_choose, served, logits))

    # The end of one ---------------------------------------------------------------------------

    def _try(self, served: Served, do: Callable[[], bool | None]) -> bool:
        """Do something for one request, which fails alone.

        Returns:
            Whether what was done says to go on, or has failed.
        """
        try:
            return do() is not False
        except BaseException as error:
            try:
                self._end(served, "error", partial(served.fail, error))
            except Exception as second:  # its cache would not close: the others go on
                _LOG.error("a request that failed did not end: %s", second, exc_info=second)
            return True

    def _finish(self, served: Served) -> None:
        keep = partial(self._keep, served)
        self._try(served, lambda: self._end(served, None, partial(served.finish, keep)))

    def _end(self, served: Served, reason: str | None, end: Callable[[], str | None]) -> None:
        with self._changed:
            for where in (self._waiting, self._reading, self._decoding):
                if served in where:
                    where.remove(served)
        count, stats = self._stats, served.stats
        if stats is not None:
            count.new_tokens += served.usage.new_tokens
            for phase in (stats.prefill, stats.decode, stats.verify):
                count.read_bytes += phase.read_bytes
                count.written_bytes += phase.written_bytes
                count.stall_s += phase.stall_s
                count.units_wanted += phase.units_wanted
                count.units_hit += phase.units_hit
        reason = end() or reason or "error"
        with self._changed:
            count.finished[reason] = count.finished.get(reason, 0) + 1


def _choose(served: Served, logits: Tensor | Exception) -> None:
    if isinstance(logits, Exception):
        raise logits
    served.run.step(logits)
