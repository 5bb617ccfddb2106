"""Admission: which requests get a cache, out of one ledger for all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from penstock.core.byte_size import format_bytes, parse_bytes
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.ledger import MemoryLedger, Reservation
from penstock.generation.batch_runner import BatchRunner
from penstock.generation.prompts import visuals_in
from penstock.generation.requests import Batch
from penstock.generation.serving.request import Request, StoredBeginnings
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_settings import free_bytes, is_auto
from penstock.models.model_shape import inspect_model
from penstock.models.weight_access import model_device

Memory: TypeAlias = int | float | str | None

_TRIES = 8
"""How often a cache's plan is asked for with what it said would do."""
ITEM = "caches of requests"


class Admission:
    """Makes the caches of requests, and books what they may hold.

    What a request gets depends on the request and the engine's settings alone, never on what
    others hold: its tokens would depend on them otherwise.
    """

    def __init__(
        self, runner: BatchRunner, memory: Memory, max_running: int,
        sessions: StoredBeginnings | None = None,
    ) -> None:  # fmt: skip
        """Divide the memory.

        Args:
            memory: of all requests together, in bytes or "2GiB"; "auto": half of what is free now;
                None: what the LLM's own setting says, if it is a size, or "auto".
            sessions: what requests may begin with.

        Raises:
            ConfigError: it is not a size.
        """
        own, config = runner.choices.memory, runner.choices.config
        total = _size(memory)
        if total is None and memory is not None and not is_auto(memory):
            raise ConfigError(f"memory={memory!r} of an engine is a size, such as 2GiB, or auto")
        if total is None and not is_auto(memory):
            total = _size(own)
        if total is None:
            total = free_bytes(model_device(runner.loaded.model)) // 2
        self.ledger = MemoryLedger(total)
        self._runner, self._sessions = runner, sessions
        is_share = config is None and (is_auto(own) or _size(own) is not None)
        self._share = max(1, total // max_running) if is_share else None

    def check(self, request: Request, batch: Batch) -> None:
        """Refuse what will never fit; behind a stored text that is known at its turn.

        Raises:
            BudgetError: says how much it needs.
        """
        shape = inspect_model(self._runner.loaded.model).kv
        full = shape.full_cache_bytes(batch.num_answers, batch.most_tokens)
        if request.document is None and full > self.ledger.limit_bytes:
            self.open(request, batch, may_be_stored=False)[0].close()

    def open(
        self, request: Request, batch: Batch, *, may_be_stored: bool = True
    ) -> tuple[TieredCache, tuple[str, ...]]:
        """Make the cache of a request, without room for it in the ledger yet.

        Args:
            may_be_stored: look for a stored beginning.

        Returns:
            The cache, and notices about it.

        Raises:
            BudgetError: it does not fit into all of the memory.
            As for `TieredCache` and, with a document, `Document.cache`.
        """
        runner, limit = self._runner, self.ledger.limit_bytes
        choices = runner.choices.for_batch(batch.num_answers, batch.most_tokens)
        make: Callable[[Memory], TieredCache]
        if request.document is None:

            def make(memory: Memory) -> TieredCache:
                stored = self._stored(request, batch, memory) if may_be_stored else None
                return stored or runner.open(
                    batch, replace(choices, memory=memory), copies_weights=False
                )
        else:
            document, options = request.document, dict[str, Any](copies_weights=False)
            if runner.choices.policy is not None:
                options["policy"] = choices.policy

            def make(memory: Memory) -> TieredCache:
                stored = None
                if may_be_stored:
                    stored = self._stored(request, batch, memory, **options)
                return stored or document.cache(
                    new_tokens=batch.most_tokens - len(document.tokens),
                    batch_size=batch.num_answers, memory=memory, exact=runner.exact, **options,
                )  # fmt: skip

        if self._share is None:
            cache = make(choices.memory)
        else:
            cache = self._at_least(make, min(limit, self._share * batch.num_answers))
        if self.price(cache) > limit:
            cache.close()
            raise _too_large(self.price(cache), limit)
        return cache, choices.notices

    def _stored(
        self, request: Request, batch: Batch, memory: Memory, **options: Any
    ) -> TieredCache | None:
        """A cache with what is stored of the prompt's beginning."""
        [ids] = batch.prompts.token_ids
        params = batch.requests[0].params
        if self._sessions is None or visuals_in(ids) or params.prompt_logprobs is not None:
            return None
        return self._sessions.open(
            request.cache_salt, ids, max_tokens=batch.most_tokens, batch_size=batch.num_answers,
            memory=memory, exact=self._runner.exact, behind=request.document,
            **{"copies_weights": False, "prompt_tokens": len(ids), **options},
        )  # fmt: skip

    def _at_least(self, make: Callable[[Memory], TieredCache], share: int) -> TieredCache:
        """A cache of a share of the memory, or of the least that would do."""
        limit = self.ledger.limit_bytes
        for _ in range(_TRIES):
            try:
                return make(share)
            except BudgetError as error:
                if error.needed_bytes is None or share >= limit:
                    raise
                if error.needed_bytes > limit:
                    raise _too_large(error.needed_bytes, limit) from error
                share = min(limit, error.needed_bytes if error.needed_bytes > share else 2 * share)
        return make(share)

    @staticmethod
    def price(cache: TieredCache) -> int:
        """Most fast memory that a cache will hold, in bytes."""
        plan = cache.plan
        return plan.total_bytes if plan.is_resident else cache.report().limit_bytes

    def book(self, cache: TieredCache) -> Reservation | None:
        """Take a cache's bytes from the ledger; None where they are not free now."""
        price = self.price(cache)
        return None if price > self.ledger.free_bytes else self.ledger.take(ITEM, price)


def _size(memory: Memory) -> int | None:
    """A memory setting that is a size, in bytes; None for other settings."""
    if isinstance(memory, int):
        return memory
    if isinstance(memory, str) and not is_auto(memory) and not set("/%") & set(memory):
        return parse_bytes(memory)
    return None


def _too_large(needed: int, limit: int) -> BudgetError:
    return BudgetError(
        f"the request needs {format_bytes(needed)} and all requests together have "
        f"{format_bytes(limit)}; shorten it, ask for fewer tokens, or give the engine more memory",
        needed,
    )
