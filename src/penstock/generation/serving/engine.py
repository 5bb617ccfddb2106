"""Engine: requests that come and go, over one model and in one memory budget."""

import threading
import weakref
from itertools import count
from types import TracebackType

from penstock.core.errors import ConfigError, PromptError
from penstock.generation.engine import LLM
from penstock.generation.prompts import TokenIds, encode, single_prompt, text_in, visuals_in
from penstock.generation.requests import Batch
from penstock.generation.serving.admission import Admission, Memory
from penstock.generation.serving.handle import Handle, OnEvent
from penstock.generation.serving.request import Request, StoredBeginnings
from penstock.generation.serving.served import Served
from penstock.generation.serving.stats import EngineStats
from penstock.generation.serving.worker import Worker


class Engine:
    """Serves requests from any thread with one thread of its own.

        with Engine(llm, memory="2GiB") as engine:
            handle = engine.submit(Request(prompt="The sky is"))
            for event in handle:      # or: async for event in handle
                if isinstance(event, Token):
                    print(event.text, end="", flush=True)

    A request waits until its cache fits (`Queued`); its prompt is read in chunks between the steps
    of others (`Prefill`); then its answers grow by a `Token` at a time, until `Finished` or
    `Failed`. Each request has a cache, sampling settings and an end of its own, and its tokens do
    not depend on what else is served.

    Requests of models with recurrent layers or pictures, on a GPU, and of an `LLM` that verifies
    drafts take turns, each with forward passes of its own; an answer of drafts holds up the others.
    """

    def __init__(
        self, llm: LLM, *, memory: Memory = None, max_running: int = 16, max_waiting: int = 64,
        prefill_chunk_size: int = 256, sessions: StoredBeginnings | None = None,
    ) -> None:  # fmt: skip
        """Start the thread.

        Args:
            llm: the model, and how caches are made: policy, store, adapter and the others.
            memory: of all requests together, in bytes or "2GiB"; "auto": half of what is free now;
                None: the `memory` of the LLM if it is a size, else "auto". Where the LLM's is a
                fraction, or None for all of the cache, each request gets that. Else it gets an
                equal share for each of `max_running`, or the least that it needs.
            max_running: most requests that have a cache.
            max_waiting: most requests that wait for one.
            prefill_chunk_size: tokens of a prompt that are read between two steps of others.
            sessions: where conversations are stored, and found again by the longest stored
                beginning of a prompt with the same `cache_salt`; closed by its owner, later.

        Raises:
            ConfigError: a setting is out of its range.
        """
        for name, value in {
            "max_running": max_running,
            "prefill_chunk_size": prefill_chunk_size,
        }.items():
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if max_waiting < 0:
            raise ConfigError(f"{max_waiting=} must be at least 0")
        self._llm, self._numbers = llm, count()
        runner = llm.runner_with(chunk=prefill_chunk_size)
        self._admission = Admission(runner, memory, max_running, sessions)
        self._worker = Worker(runner, self._admission, max_running, max_waiting, sessions)
        # Also when Python ends, before a daemon thread is cut off inside a forward pass.
        self._close = weakref.finalize(self, _end, self._worker, True)

    @property
    def llm(self) -> LLM:
        """The model that it serves."""
        return self._llm

    def submit(self, request: Request, on_event: OnEvent | None = None) -> Handle:
        """Ask something, from any thread; returns at once.

        Args:
            on_event: called with each event too, in the engine's thread (`Queued`: in this one); it
                must be quick. What it raises fails the request.

        Raises:
            PromptError: the prompt is empty, unreadable, or longer than the model's positions.
            ConfigError: the settings are impossible.
            BudgetError: it does not fit into the engine's memory, ever; behind a stored text, or
                where the LLM's memory is a fraction, `Failed` may say so instead.
            QueueFullError: `max_waiting` requests wait.
            CacheStateError: the engine is closed.
        """
        batch = self._batch_of(request)
        self._admission.check(request, batch)
        served: Served
        handle = Handle(lambda: self._cancel(served), on_event)
        served = Served(next(self._numbers), request, batch, handle._put)
        self._worker.submit(served)
        return handle

    def stats(self) -> EngineStats:
        """What it does now, and has done since it began; from any thread."""
        return self._worker.stats()

    @property
    def error(self) -> BaseException | None:
        """What has ended it before `close`; None while it serves."""
        return self._worker.error

    def close(self, timeout_s: float | None = None) -> None:
        """Take no more requests, let those that are there end, and stop the thread.

        Args:
            timeout_s: then cancel what is left; 0: cancel all at once; None: wait.
        """
        self._worker.stop(abort=timeout_s == 0)
        if timeout_s:
            self._worker.thread.join(timeout_s)
        elif timeout_s is None:
            self._worker.thread.join()
        self._close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None if error is None else 0)

    def _cancel(self, served: Served) -> None:
        served.is_cancelled = True
        self._worker.wake()

    def _batch_of(self, request: Request) -> Batch:
        """The prompt, encoded and checked, behind the tokens of a stored text."""
        prompt = single_prompt(request.prompt)
        if request.document is not None:
            stored, text = request.document.tokens, text_in(prompt)
            ids = encode(self._llm.loaded, prompt, alone=False)
            if not ids:
                raise PromptError("the prompt is empty: it has zero tokens")
            new = [each.moved(len(stored)) for each in visuals_in(ids)]
            prompt = TokenIds([*stored, *ids], text, [*visuals_in(stored), *new])
        [batch] = self._llm.batches([prompt], request.sampling)
        return batch


def _end(worker: Worker, abort: bool) -> None:
    worker.stop(abort=abort)
    if worker.thread is not threading.current_thread():  # which the garbage collector may run in
        worker.thread.join()
