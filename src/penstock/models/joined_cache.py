"""JoinedCache: several caches as one, for a forward pass of a token a row."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import override

from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.segments import Segments
from penstock.engine.joined_runtime import JoinedRuntime, new_attended, rows_of
from penstock.kernels.plain_attention import add_attention_sink, attention_twin
from penstock.models.attention_adapter import mark_keys
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument, position_argument
from penstock.models.cache_layers import EmptyLayer, WindowLayer
from penstock.models.fused_step import fused_parts
from penstock.models.key_handover import KeyHandover
from penstock.models.model_shape import decoder_config, inspect_model
from penstock.models.prefetch_hooks import PrefetchHooks

_ALIKE = 4
"""Products of so many rows, or of a multiple, say the same of a row whatever the others are. Fewer,
or a rest, take other kernels (MKL, float32)."""


class JoinedCache(Cache):  # type: ignore[misc]
    """Rows of several caches in one decode step, each at its own length.

    Attention is each cache's own; all else is one product for all rows. The caches need not be the
    same from step to step. Models with recurrent layers, and those that see, do not join.
    """

    def __init__(self, model: PreTrainedModel, like: TieredCache) -> None:
        """Put on the model what the steps need there.

        Args:
            like: one of those that will join; see `may_join`.
        """
        shape = inspect_model(model)
        self._model, self._caches = model, list[TieredCache]()
        self._records = like.graph_decoder is not None
        self._runtime = JoinedRuntime(like.tiers, records=self._records)
        self._handover = KeyHandover(shape.kv, decoder_config(model), unmasked=True)
        layers: dict[int, Any] = {i: _Window(self, i) for i in shape.windows}
        layers |= {i: _Tier(self, t) for t, i in enumerate(shape.tiered_layers)}
        super().__init__(
            layers=[layers.get(i) or EmptyLayer() for i in range(len(shape.layer_types))]
        )
        self._hooks = PrefetchHooks(model, shape, self._runtime)
        self._segments: dict[int, Segments] = {}
        """On a GPU the model's own launches, by the rows of a pass."""

    @torch.no_grad()
    def step(
        self, caches: Sequence[TieredCache], tokens: Sequence[Sequence[int]]
    ) -> list[Tensor | Exception]:
        """Take one token a row into each cache.

        Args:
            caches: each holds tokens already.
            tokens: of the rows of each cache.

        Returns:
            For each cache the logits behind its tokens, float32 [rows, vocabulary], or what it
            failed of; it is torn then. An error of the model itself is raised: all are torn.
        """
        self._caches, is_done = list(caches), False
        try:
            self._runtime.begin([cache.tiers for cache in caches])
            logits, is_done = self._forward(tokens), True
            failures = self._runtime.failures
            return [
                failures.get(number, logits[part])
                for number, part in enumerate(self._runtime.parts)
            ]
        finally:
            self._handover.forget()
            self._caches = []
            self._runtime.end(is_done=is_done)

    def _forward(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        settings = self._runtime.settings
        ids = [token for each in tokens for token in each]
        at = [cache.tiers.length for cache in self._caches for _ in range(cache.tiers.batch)]
        rest = 0
        if self._records:
            rest = max(_ALIKE, 1 << (len(ids) - 1).bit_length()) - len(ids)
        elif settings.shape.dtype == torch.float32:
            rest = -len(ids) % _ALIKE
        ids, at = ids + [ids[0]] * rest, at + [0] * rest
        given = [torch.tensor(each, device=settings.device)[:, None] for each in (ids, at)]
        return self._recorded(*given) if self._records else self._launched(*given)

    def _launched(self, ids: Tensor, positions: Tensor) -> Tensor:
        model: Any = self._model
        out = model(ids, position_ids=positions, **cache_argument(model, self), use_cache=True)
        logits: Tensor = out.logits[:, -1]
        return logits.float()

    def _recorded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """A replay, from the second pass of so many rows on; kernels are compiled in the first."""
        known = self._segments.get(len(ids))
        if known is None:
            self._segments[len(ids)] = Segments(len(ids), ids.device)
        elif not (known.is_recorded or known.has_failed):
            self._runtime.recording = known
            try:
                with fused_parts(self._model):
                    known.record(self._launched)
            finally:
                self._runtime.recording = None
                self._handover.forget()
        if known is None or known.has_failed:
            return self._launched(ids, positions)
        return known.replay(ids, positions).clone()

    # The seam ---------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """A layer has new keys and values of all rows; returns them marked."""
        found: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return found

    def before_layer(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """A decoder layer begins; see `PrefetchHooks.before_layer`."""
        self._hooks.before_layer(layer, hidden, kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Caches are cropped one by one.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    def expect(self, tier: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mark keys of a tier's layer."""
        return self._handover.expect(
            tier, keys, values, attend=self._runtime.attend, failed=_nothing
        )

    def attend_in_windows(self, layer: int, call: AttentionCall) -> Tensor:
        """Attend to each cache's sliding window, which takes its new token in.

        Returns:
            [rows, 1, num_heads, head_dim]
        """
        out = new_attended(call)
        self._runtime.run(partial(self._attend_in_windows, layer, call, out))
        return out

    def _attend_in_windows(self, layer: int, call: AttentionCall, out: Tensor) -> None:
        for number, (cache, part) in enumerate(zip(self._caches, self._runtime.parts, strict=True)):
            if number in self._runtime.failures:
                continue
            own = rows_of(call, part)
            window: WindowLayer = cache.layers[layer]
            keys, values = window.update(own.keys, own.values)
            found, lse = attention_twin(
                own.query, keys, values, scaling=own.scaling, softcap=own.softcap
            )
            if own.sink_logits is not None:
                found, _ = add_attention_sink(found, lse, own.sink_logits)
            out[part] = found.to(out.dtype).transpose(1, 2)

    def longest(self) -> int:
        """Tokens of the row that holds most."""
        return max((cache.tiers.length for cache in self._caches), default=0)

    def close(self) -> None:
        """Leave the model as it was."""
        self._segments.clear()
        self._hooks.remove()


def may_join(model: PreTrainedModel, cache: TieredCache) -> bool:
    """Whether a cache's rows can go through steps with those of others."""
    return (
        cache.decoder_calls is None
        and not inspect_model(model).states
        and bool(position_argument(model, cache, 0, 1))
    )


def _nothing() -> None:
    """A step that fails has torn its caches already."""


class _Part(CacheLayerMixin):  # type: ignore[misc]
    """One layer, as transformers calls it."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: JoinedCache, number: int) -> None:
        super().__init__()
        self._cache, self._number = cache, number
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def get_seq_length(self, *_: Any) -> int:
        """Tokens of the longest row."""
        return self._cache.longest()

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Of a mask that is never looked at."""
        return self._cache.longest() + 1, 0

    def get_max_length(self) -> int:
        """Each cache looks to its own."""
        return -1

    get_max_cache_shape = get_max_length


class _Tier(_Part):
    """A layer in tiers."""

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.expect(self._number, key_states, value_states)


class _Window(_Part):
    """A layer with a sliding window."""

    is_sliding = True

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        def attend(call: AttentionCall) -> Tensor:
            return self._cache.attend_in_windows(self._number, call)

        mark_keys(key_states, attend, unmasked=True)
        return key_states, value_states
