"""BatchRunner: runs batches one behind the other, each over a cache of its own or a caller's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.core.trace import Tracer
from penstock.generation.batch_cache import batch_cache
from penstock.generation.batch_run import BatchRun, Listeners, OnText
from penstock.generation.cache_choices import BatchChoices, CacheChoices
from penstock.generation.output import RequestOutput
from penstock.generation.requests import Batch
from penstock.generation.sampler import Sampler
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import LoadedModel
from penstock.storage.store import Sealing

OnProgress = Callable[[int, int], None]
"""Called after each prefill chunk with the tokens done and the tokens in all, padding counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRunner:
    """A model, how its caches are made, and how tokens are chosen."""

    loaded: LoadedModel
    choices: CacheChoices
    exact: bool
    seal: Sealing
    graphs: bool
    """Whether CUDA graphs are recorded."""
    chunk: int
    """Tokens per forward pass of prompts."""
    sampler: Sampler
    verify: int | None = None
    """Tokens that are drafted under the policy and checked together; None: none."""

    def run_all(
        self, batches: Sequence[Batch], listeners: Listeners, **options: Any
    ) -> list[RequestOutput]:
        """Run batches one behind the other; answers are counted over all of them."""
        outputs: list[RequestOutput] = []
        on_text, first = listeners.on_text, 0
        for batch in batches:
            if on_text is not None:
                listeners = replace(listeners, on_text=partial(_numbered_from, first, on_text))
            outputs += self._run(batch, listeners, **options)
            first += batch.num_answers
        return outputs

    def _run(
        self, batch: Batch, listeners: Listeners, *, on_progress: OnProgress | None = None,
        on_index: Callable[[float], None] | None = None, tracer: Tracer | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer a batch over a cache of its own."""
        choices = self.choices.for_batch(batch.num_answers, batch.most_tokens)
        with self.open(batch, choices, on_progress, on_index=on_index, tracer=tracer) as cache:
            return self.answer(batch, cache, listeners, notices=choices.notices)

    def open(
        self, batch: Batch, choices: BatchChoices, on_progress: OnProgress | None = None,
        on_index: Callable[[float], None] | None = None, **options: Any,
    ) -> TieredCache:  # fmt: skip
        """Make a cache for a batch, which holds nothing yet.

        Args:
            options: further arguments of `TieredCache`.
        """
        total = batch.prompts.padded_tokens
        make = partial(
            TieredCache, self.loaded.model, store=choices.store, max_tokens=batch.most_tokens,
            batch_size=batch.num_answers, exact=self.exact, sealed=self.seal,
            adapter=choices.adapter, cuda_graphs=self.graphs,
            progress=None if on_progress is None else lambda done: on_progress(done, total),
            prompt_tokens=total, index_progress=on_index, known=self.loaded.known, **options,
        )  # fmt: skip
        prompts, answers = len(batch.requests), batch.num_answers
        return batch_cache(make, choices, prompts=prompts, answers=answers)

    def answer(
        self, batch: Batch, cache: TieredCache, listeners: Listeners, *,
        notices: tuple[str, ...], recomputed: int = 0,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer a batch over a cache that is the caller's.

        Args:
            notices: for the report.
            recomputed: tokens of what the cache holds, for the report.
        """
        held = cache.get_seq_length()
        run = self.begin(batch, cache, listeners)
        run.run()
        return run.outputs(run.report(notices, restored=held - recomputed, recomputed=recomputed))

    def begin(self, batch: Batch, cache: TieredCache, listeners: Listeners) -> BatchRun:
        """A run over a cache that is the caller's, before its first chunk."""
        return BatchRun(
            self.loaded, batch.prompts, batch.requests, cache, sampler=self.sampler,
            chunk=self.chunk, listeners=listeners, verify=self.verify,
        )  # fmt: skip


def _numbered_from(first: int, on_text: OnText, number: int, piece: str) -> None:
    """Pass on a piece of an answer by its number in the call."""
    on_text(first + number, piece)
