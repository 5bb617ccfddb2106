"""TieredCache: the tiers as a transformers Cache, for plain `model.generate`."""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from penstock.core.byte_size import format_bytes
from penstock.core.closing import DeferredInterrupts, close_all
from penstock.core.errors import (
    BudgetError,
    CacheStateError,
    ConfigError,
    PenstockError,
)
from penstock.core.ledger import MemoryReport
from penstock.core.slot_plan import SlotPlan
from penstock.core.stats import RunStats
from penstock.core.trace import Tracer
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.runtime_settings import STATE_COPIES, RuntimeSettings
from penstock.engine.stored_past import StoredPast
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import SelectionPolicy
from penstock.models.attention_adapter import Attachment, mark_window
from penstock.models.attention_scaling import attention_scaling
from penstock.models.budget_advice import add_advice
from penstock.models.cache_layers import EmptyLayer, TieredCacheLayer, WindowLayer
from penstock.models.cache_settings import (
    find_basis,
    find_rotations,
    is_auto,
    limit_bytes,
    measured_prediction,
    named_policy,
    serves_device_tier,
    true_query_layers,
)
from penstock.models.decoder_calls import DecoderCalls, sees
from penstock.models.graph_decoder import GraphDecoder
from penstock.models.key_handover import KeyHandover
from penstock.models.known_model import KnownModel, ModelAnswers
from penstock.models.model_shape import ModelShape, check_rope, decoder_config, inspect_model
from penstock.models.own_cache import own_cache_class
from penstock.models.prefetch_hooks import PrefetchHooks, predictor_bytes
from penstock.models.recurrent_cache import RecurrentCache
from penstock.models.recurrent_layers import StateLayer, StateStep
from penstock.models.rotary import rotary_of
from penstock.models.state_sizes import measure_states
from penstock.storage.store import Sealing

_LOG = logging.getLogger(__name__)
LIMIT_TRIES = 8
"""How often "auto" asks what would do; each answer is for what was wanted first."""


class TieredCache(RecurrentCache):
    """A KV cache in tiers, for `model.generate(**inputs, cache=cache)`.

    Full-attention layers keep their whole KV on disk (or wherever `store` says) and a bounded part
    in memory, chosen anew at each step by `policy`; sliding-window layers keep their window, and
    recurrent ones their state. The model is not modified: its attention implementation is switched
    to Penstock's while the cache is open and put back by `close`.

        with TieredCache(model, policy="kvswap", memory="1/13", max_tokens=33_000) as cache:
            out = model.generate(**inputs, cache=cache, prefill_chunk_size=1024)

    Before transformers 5.24 the argument was called `past_key_values`.
    """

    _open = False
    _length = 0
    """Tokens held before the step under way."""
    _attachment: Attachment | None = None
    _hooks: PrefetchHooks | None = None
    graph_decoder: GraphDecoder | None = None
    """What records and replays decode steps on a GPU; the model's `forward` asks it."""
    decoder_calls: DecoderCalls | None = None
    """What the text decoder of a model that sees is called with; None for others."""

    def __init__(
        self, model: PreTrainedModel, policy: str | SelectionPolicy = "kvswap",
        memory: int | float | str | None = None, store: str | Path = "auto", *,
        max_tokens: int | None = None, batch_size: int = 1, exact: bool = False,
        adapter: str | Path | LowRankAdapter | None = None, cuda_graphs: bool = True,
        tracer: Tracer | None = None, progress: Callable[[int], None] | None = None,
        prompt_tokens: int | None = None, index_progress: Callable[[float], None] | None = None,
        past: StoredPast | None = None, past_tokens: int | None = None, must_tier: bool = False,
        sealed: Sealing = "auto", sector_bytes: int | None = None, checkpoints: int = 0,
        copies_weights: bool = True, known: KnownModel | None = None,
    ) -> None:  # fmt: skip
        """Plan the memory and switch the model over; nothing large is allocated yet.

        Args:
            model: any decoder of transformers that uses the attention interface.
            policy: "kvswap", "full", "flexgen", or a `SelectionPolicy`.
            memory: budget for all fast memory of the cache: bytes, "512MiB", a fraction of the full
                cache at `max_tokens` and `batch_size` ("1/13"), "auto" (never too little), or None.
                Recurrent states are in it; a fraction is of keys and values, and they come on top.
            store: see `KVStore.create`; or "host", memory that a GPU reads and writes by itself
                (the device tier; on CUDA "memory" means the same to policies that can).
            max_tokens: most tokens per sequence, prompt, padding and answer; default: the model's
                positions. Sizes the index, so give what you need.
            batch_size: rows expected (beams counted); a fraction in `memory` is of so many.
            exact: stream the past through attention at every step: plain attention, slowly.
            adapter: low-rank basis for policies that use one; default: what `penstock calibrate`
                made, or a shipped one; else, and for "none", one of the prompt's own keys.
            cuda_graphs: record the whole decode step in the device tier on CUDA, and replay it.
            tracer: collects spans of compute and I/O.
            progress: called with the tokens cached after every prefill chunk.
            prompt_tokens: of a row, padding included; its index is then made behind the last chunk.
            index_progress: called with the share of that work that is done, from 0 to 1.
            past: KV on disk that every row begins with (see `Document.cache`).
            past_tokens: begin with so many of its tokens; default: all.
            must_tier: keep no more than slots in memory, also where the budget would hold all.
            sealed, sector_bytes: see `KVStore.create`; documents' make a plan like theirs.
            checkpoints: most to keep (see `checkpoint`); each takes the recurrent states' memory.
            copies_weights: may keep 8-bit copies of the weights that predict queries.
            known: what caches have found out about the model (`LoadedModel.known`).

        Raises:
            UnsupportedModelError: the model cannot work with a tiered cache; says why.
            BudgetError: the memory is too little; names the smallest that would do.
            AdapterError: the adapter was made for another model.
            ConfigError: another argument makes no sense.
            StorageError: the store cannot be used, or the past cannot be read.
        """
        shape, self.notices = inspect_model(model), list[str]()
        self.max_tokens = _most_tokens(model, shape, max_tokens, batch_size)
        how: Any = {"exact": exact, "known": known.look(model) if known else ModelAnswers(model)}
        chosen, (kv, device) = named_policy(policy), how["known"].first_look(shape)
        given, full = (model, shape, chosen, adapter, self.notices), kv.full_cache_bytes
        states, basis = self._make_states(model, shape, checkpoints), find_basis(*given, **how)
        sizes = (full(batch_size, self.max_tokens), device, states * batch_size)
        late = true_query_layers(chosen, basis or measured_prediction(*given, **how))
        self._settings = RuntimeSettings(
            shape=kv, policy=chosen, store=str(store), max_tokens=self.max_tokens,
            limit_bytes=limit_bytes(memory, *sizes), exact=exact, state_bytes=states,
            adapter=None if basis is None else basis.shared_layers(), true_query_layers=late,
            predictor_bytes=predictor_bytes(model, shape, chosen, late) if copies_weights else 0,
            rotary=rotary_of(model), scaling=attention_scaling(model, kv.head_dim), tracer=tracer,
            rotations=find_rotations(model, shape, chosen, basis, self.notices, **how),
            device_tier=serves_device_tier(str(store), chosen, device, kv, exact=exact),
            past=past, must_tier=must_tier, sealed=sealed, sector_bytes=sector_bytes, device=device,
            progress=progress, prompt_tokens=prompt_tokens, index_progress=index_progress,
        )  # fmt: skip
        self._plan(batch_size, at_least=is_auto(memory))
        super().__init__(layers=self._make_layers(shape))
        self._attach(model, shape, record=cuda_graphs and device.type == "cuda")
        self._restore(past, batch_size, past_tokens)

    def _plan(self, batch: int, *, at_least: bool) -> None:
        """Divide the budget.

        Args:
            at_least: take the smallest that would do where it is too small.
        """
        for _ in range(LIMIT_TRIES if at_least else 0):
            try:
                self._runtime = TieredRuntime(self._settings, batch)
                return
            except BudgetError as error:
                limit, needed = self._settings.limit_bytes, error.needed_bytes
                if limit is None or needed is None:
                    raise
                # What a part of the cache needs may be less than the limit of all of it.
                more = needed if needed > limit else 2 * limit
                self._settings = replace(self._settings, limit_bytes=more)
        try:
            self._runtime = TieredRuntime(self._settings, batch)
        except BudgetError as error:
            add_advice(error, self._settings, batch)
            raise

    def _attach(self, model: PreTrainedModel, shape: ModelShape, *, record: bool) -> None:
        """Put on the model what this cache needs there; nothing stays if that fails."""
        self.passes_for = own_cache_class(model)
        self._windows = [layer for layer in self.layers if isinstance(layer, WindowLayer)]
        self._others = [*self._windows, *self._states.values()]
        self._runtime.set_other_layers(self._others)
        self._handover = KeyHandover(self._settings.shape, decoder_config(model))
        try:
            self._attachment = Attachment(model)
            self._hooks = PrefetchHooks(model, shape, self._runtime)
            if sees(model):
                self.decoder_calls = DecoderCalls(model)
            if record and self._settings.device_tier and not self._states:
                self.graph_decoder = GraphDecoder(model, weakref.ref(self), self._runtime)
        except BaseException:
            self._release()
            raise
        self._open = True
        if self._runtime.plan.is_resident:
            self.notices.clear()  # they are about how tokens are selected
        _LOG.info("%r", self)

    def _restore(self, past: StoredPast | None, batch: int, tokens: int | None) -> None:
        if past is None:
            return
        try:
            past.require_shape(self._settings.shape)
            self._runtime.restore(batch, tokens)
        except BaseException:
            self.close()
            raise

    def _make_states(self, model: PreTrainedModel, shape: ModelShape, checkpoints: int) -> int:
        """Have the recurrent layers; returns what they take of a row's memory, in bytes."""
        sizes, self.takes_chunks = measure_states(model, shape)
        self._room = checkpoints
        self._states = {i: StateLayer(count, sizes[i]) for i, count in shape.states.items()}
        return (STATE_COPIES + checkpoints) * sum(sizes.values())

    def _make_layers(self, shape: ModelShape) -> list[CacheLayerMixin]:
        layers: dict[int, Any] = dict(self._states)
        layers |= {i: WindowLayer(window) for i, window in shape.windows.items()}
        layers |= {i: TieredCacheLayer(self, t) for t, i in enumerate(shape.tiered_layers)}
        return [layers.get(i) or EmptyLayer() for i in range(len(shape.layer_types))]

    # The seam ---------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """A layer has new keys and values; the first of a step is where a call is refused.

        Returns:
            Keys and values for the attention function: all of the window's, or marked new ones.

        Raises:
            CacheStateError: closed, another batch than before, beyond `max_tokens`, or an earlier
                step failed halfway. The cache is as before.
            UnsupportedModelError: the keys are not those that the configuration promises.
        """
        self._enter(layer_idx, "attention")
        if not self._step.is_counted:
            self._count_step(key_states)
        try:
            layer = self.layers[layer_idx]
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
            if isinstance(layer, WindowLayer):
                mark_window(keys, self._take_back)
        except BaseException:
            self._take_back()
            raise
        return keys, values

    def _begin_step(self) -> None:
        self._handover.begin_step()
        if self._states:
            self._take_back()  # what recurrent layers have of it
        self._runtime.check_sound()
        self._length = self._runtime.length
        self._step = StateStep(self._length)

    def _count_step(self, keys: Tensor) -> None:
        """Refuse what cannot be taken in, before any layer with keys and values has."""
        try:
            self._runtime.check_step(keys.shape[0], keys.shape[2])
            self._require_chunks(keys.shape[2])
        except BaseException:
            self._take_back()
            raise
        self._step.count, self._step.is_counted = keys.shape[2], True

    def _take_back(self) -> None:
        """Of a step that was refused or failed before any tier took it in, nothing stays."""
        if any(length != self._length for length in self._runtime.lengths):
            return
        ahead = [(each, each.get_seq_length() - self._length) for each in self._others]
        if all(count >= 0 and each.can_remove(count) for each, count in ahead):
            for each, count in ahead:
                if count:
                    each.remove(count)

    def _expect(self, tier: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer has new keys; returns them marked, as the model takes them."""
        return self._handover.expect(
            tier, keys, values, attend=self._runtime.attend, failed=self._take_back
        )

    def before_layer(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """A decoder layer begins; see `PrefetchHooks.before_layer`."""
        if self._hooks is not None:
            self._hooks.before_layer(layer, hidden, kwargs)

    def forget_awaited(self) -> None:
        """A forward pass was given up between a layer's keys and its attention."""
        self._handover.forget()

    # What generate asks -----------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens.

        Args:
            tokens_to_remove: minus the number of tokens to remove; a positive number is the length
                to keep (as older transformers have it). Behind a step that failed, what is kept
                is at most what was there before it.

        Raises:
            CacheStateError: a sliding window has moved too far on to go back, or recurrent layers
                have no state of that length (see `checkpoints`); nothing is removed.
        """
        tokens_to_remove = int(tokens_to_remove)  # some releases give a tensor
        lengths = [*self._runtime.lengths, *(each.get_seq_length() for each in self._others)]
        length = max(lengths, default=0)
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        keep = max(0, min(keep, self._runtime.sound_length()))
        self._require_way_back(keep)
        self._load_states(keep)
        self._runtime.crop(keep)
        self._crop_positions(keep)
        for layer in self._others:
            layer.remove(layer.get_seq_length() - keep)

    def _crop_positions(self, length: int) -> None:
        if self.decoder_calls is not None:
            self.decoder_calls.positions.crop(length)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """For `with`: tokens that come inside are taken back at the end, sliding windows and
        recurrent states too.

        Raises:
            StorageError: what they had pushed out of memory could not be read again.
        """
        length = self.get_seq_length()
        others: list[tuple[Any, Any]] = [(layer, layer.held()) for layer in self._others]

        def take_back() -> None:
            self._runtime.crop(min(length, self._runtime.sound_length()))
            self._crop_positions(length)
            for layer, held in others:
                layer.hold_again(held)

        try:
            yield
        except BaseException:
            with suppress(PenstockError):  # what is raised already says more
                take_back()
            raise
        take_back()

    def checking_drafts(self) -> AbstractContextManager[None]:
        """For `with`, around drafts and the passes that check them: what was fetched for the ones
        is there for the next ones."""
        return self._runtime.checking_drafts()

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """For `with`: passes of several tokens check drafts; they are counted as such, and are no
        progress of a prompt."""
        self._runtime.verifying = True
        try:
            yield
        finally:
            self._runtime.verifying = False

    @property
    def is_exact(self) -> bool:
        """Whether every decode step attends to all that was taken in."""
        retrieves = self.policy.retrieves and not self._settings.exact
        return self.plan.is_resident or not retrieves

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was (beam search)."""
        self._select_rows(beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in a row; the tiers share what is on disk.

        Raises:
            BudgetError: that many rows do not fit the budget.
        """
        rows = torch.arange(max(1, self._runtime.batch)).repeat_interleave(repeats)
        self._select_rows(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` only (numbers, or a boolean for each row).

        Raises:
            CacheStateError: no row would be left.
        """
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        if not len(indices):
            raise CacheStateError("a batch of no rows; close the cache, or reset() it for others")
        self._select_rows(indices, lambda layer: layer.batch_select_indices(indices))

    def _select_rows(self, rows: Tensor, other: Callable[[Any], None]) -> None:
        if self._states:
            self._take_back()  # what a step that was given up has left in them
        self._runtime.select_rows(rows.to(self._settings.device))  # which may refuse them
        if self.decoder_calls is not None:
            self.decoder_calls.positions.select_rows(rows)
        try:
            for layer in self._others:
                if layer.get_seq_length() > 0:
                    other(layer)
                    layer.forget_past()
        except BaseException:
            self._runtime.mixed_up()
            raise

    def reset(self) -> None:
        """Forget every token; the cache can be used again."""
        self._handover.forget()
        self._at, self._stored = -1, None
        for layer in self._others:
            layer.clear()
        self._crop_positions(0)
        self._runtime.reset()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens per row."""
        return self.max_tokens

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first token."""
        return self._runtime.batch or -1

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCache":
        raise CacheStateError(
            "a TieredCache cannot be deep-copied (it owns files and a memory budget); keep one "
            "cache and crop() it back instead"
        )

    # What users ask ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._open

    @property
    def stats(self) -> RunStats:
        """Bytes, reads, hits, stalls and times so far, of prefill and of decoding."""
        self._runtime.end_step()
        if self._runtime.device_steps is not None:
            self._runtime.device_steps.count_into(self._runtime.stats.decode)
        return self._runtime.stats

    @property
    def tiers(self) -> TieredRuntime:
        """The layers, the store and the ledger under this cache: what stores or measures it asks
        there. Layers count from 0 without those that keep a sliding window."""
        return self._runtime

    @property
    def plan(self) -> SlotPlan:
        """How the memory is divided."""
        return self._runtime.plan

    @property
    def policy(self) -> SelectionPolicy:
        """The policy with every open choice made."""
        return self._runtime.policy

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._settings.device

    @property
    def store_description(self) -> str:
        """Where the full KV lives; says so when the device is simulated."""
        return self._runtime.describe_store()

    @property
    def simulated(self) -> str | None:
        """Name of the simulated device, or None."""
        return self._runtime.simulated

    def report(self) -> MemoryReport:
        """What the cache holds in fast memory, item by item."""
        return self._runtime.report()

    def close(self) -> None:
        """Give files and memory back and the model its attention; a second call does nothing."""
        with DeferredInterrupts():
            if self._open:
                self._open = False
                self._release()

    def _release(self) -> None:
        decoder, hooks, attachment = self.graph_decoder, self._hooks, self._attachment
        calls = self.decoder_calls
        close_all(
            *(() if calls is None else (calls.remove,)),
            *(() if decoder is None else (decoder.remove,)),
            *(() if hooks is None else (hooks.remove,)),
            *(() if attachment is None else (attachment.detach,)),
            self._runtime.close,
        )

    def __enter__(self) -> "TieredCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Policy, budget, store, and how much is held of how much."""
        runtime = getattr(self, "_runtime", None)
        if runtime is None:
            return "TieredCache(not made)"
        memory, exact = runtime.report(), ", exact" if self._settings.exact else ""
        held = f"{format_bytes(memory.used_bytes)} of {format_bytes(memory.limit_bytes)}"
        rows = f" in {runtime.batch} rows" if runtime.batch > 1 else ""
        store = runtime.describe_store() if self._open else "closed"
        return (
            f"TieredCache({self.policy.name}{exact}, memory {held}, store {store}, "
            f"{runtime.length:,} of {self.max_tokens:,} tokens{rows})"
        )

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


def _most_tokens(
    model: PreTrainedModel, shape: ModelShape, wanted: int | None, batch_size: int
) -> int:
    """Tokens that a sequence may have: those wanted, or the model's positions.

    Raises:
        ConfigError: there are none, or no rows.
        UnsupportedModelError: see `check_rope`.
    """
    most = shape.max_positions if wanted is None else wanted
    if most < 1 or batch_size < 1:
        raise ConfigError(f"max_tokens={wanted} and {batch_size=} must be positive")
    check_rope(model, most)
    return most
