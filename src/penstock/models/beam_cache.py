"""BeamCache: the memory of a beam search as a transformers Cache."""

import weakref
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from penstock.core.errors import CacheStateError, UnsupportedModelError
from penstock.engine.attention_call import AttentionCall
from penstock.engine.beams.beam_memory import BeamMemory, BlockShape
from penstock.models.attention_adapter import mark_keys
from penstock.models.model_shape import decoder_config, inspect_model


def block_shape(model: PreTrainedModel, block_tokens: int) -> BlockShape:
    """What a block of this model's KV is made of: all layers, windowed ones whole.

    Raises:
        UnsupportedModelError: beams of this model cannot be kept in blocks; says why.
    """
    shape = inspect_model(model)
    if not shape.kv.is_even:
        raise UnsupportedModelError(
            f"values of {type(model).__name__} are not as wide as its keys, which beams of a "
            "search in tiers have to be"
        )
    chunked = [kind for kind in shape.layer_types if kind == "chunked_attention"]
    if chunked:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with chunked attention, which a search does not do"
        )
    if shape.states:
        raise UnsupportedModelError(
            f"{type(model).__name__} has recurrent layers, whose states a search over groups of "
            "beams does not swap; generate(num_beams=...) with a TieredCache reorders them"
        )
    layers = len(shape.layer_types)
    return BlockShape(
        kv=shape.kv.of_layers(layers), block_tokens=block_tokens,
        windows=tuple(shape.windows.get(layer) for layer in range(layers)),
    )  # fmt: skip


class BeamCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: hands new keys and values on to the attention function, which asks the memory."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: "BeamCache", layer: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys, so that the attention function finds the memory.

        Returns:
            The new keys and values alone, [batch, kv_heads, new_tokens, head_dim].
        """
        cache = self._cache()
        assert cache is not None
        cache.expect(self._layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Tokens of the longest row before this pass; positions are given with every call."""
        cache = self._cache()
        return 0 if cache is None else cache.past

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys that the new queries see."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + count, 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    get_max_cache_shape = get_max_length


class BeamCache(Cache):  # type: ignore[misc]
    """Hands every layer's attention to a `BeamMemory`; the decoder says whose turn it is.

    Attributes:
        past: tokens before this pass, as transformers should see them (it only makes masks of it,
            which is never evaluated).
    """

    def __init__(self, model: PreTrainedModel, memory: BeamMemory) -> None:
        self.past = 0
        self._memory = memory
        self._config = decoder_config(model)
        self._awaited: int | None = None
        super().__init__(
            layers=[BeamCacheLayer(self, i) for i in range(memory.shape.kv.num_layers)]
        )

    def expect(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """A layer has new keys: make sure that its attention will come to us."""
        if self._config._attn_implementation != "penstock":
            raise CacheStateError("the model's attention implementation was changed in a search")
        if self._awaited is not None:
            raise UnsupportedModelError(
                "the attention function never received the keys that the cache handed out: this "
                "model transforms them in between"
            )
        kv = self._memory.shape.kv
        if (keys.shape[1], keys.shape[3]) != (kv.num_kv_heads, kv.head_dim) or (
            values.shape != keys.shape
        ):
            raise UnsupportedModelError(
                f"keys {list(keys.shape)} and values {list(values.shape)} do not have the "
                f"{kv.num_kv_heads} heads of width {kv.head_dim} that the configuration promises"
            )
        self._awaited = layer

        def attend(call: AttentionCall) -> Tensor:
            self._awaited = None
            return self._memory.attend(layer, call)

        mark_keys(keys, attend, unmasked=True)

    def forget_awaited(self) -> None:
        """A forward pass was given up between a layer's keys and its attention."""
        self._awaited = None
