"""first_look(): what a model's first tiered layer hands to attention, seen before planning."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import PenstockError, UnsupportedModelError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.models.attention_adapter import Attachment, attention_dtype, mark_keys
from penstock.models.cache_argument import cache_argument
from penstock.models.latents import joined, returned
from penstock.models.model_shape import ModelShape
from penstock.models.own_cache import OwnCache, own_cache_class
from penstock.models.weight_access import model_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNSUPPORTED_DEVICES = {
    "mps": "Apple's GPUs are not supported, as the tiers move KV through memory pinned for CUDA",
}
"""Devices of torch whose memory the tiers cannot fill, and why."""
_FAULTS = (
    TypeError, AttributeError, ValueError, LookupError, RuntimeError, AssertionError,
)  # fmt: skip
"""What a model's code raises where our mask or our keys are not what it expects."""


class _Seen(Exception):
    """Ends the forward pass where the first tiered layer attends."""

    def __init__(self, call: AttentionCall, given: Tensor) -> None:
        super().__init__()
        self.call = call
        self.same_values = call.values is given


class _LookingCache(OwnCache, DynamicCache):  # type: ignore[misc]
    """A plain cache, but for one layer whose attention is only looked at."""

    def __init__(self, model: PreTrainedModel, layer: int, shape: KVShape) -> None:
        super().__init__(config=model.config)
        self._layer, self._shape = layer, shape
        self.passes_for = own_cache_class(model)
        self.gave_keys = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx != self._layer:
            updated: tuple[Tensor, Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
            return updated
        self.gave_keys = True

        keys, values = joined(self._shape, key_states, value_states)

        def see(call: AttentionCall) -> Tensor:
            raise _Seen(call, values)

        mark_keys(keys, see)
        return returned(self._shape, (key_states, value_states), keys, values, checked=True)


def first_look(model: PreTrainedModel, shape: ModelShape) -> tuple[KVShape, torch.device]:
    """Run two tokens up to the attention of the first tiered layer.

    A configuration promises; here the model's own code says what its cache would get, under the
    autocast that is on now. Costs a layer's work.

    Returns:
        The shape of keys and values in the dtype in which they are attended to, and their device.

    Raises:
        UnsupportedModelError: the layer's keys, values or mask are not what a tiered cache can take
            over; says why.
    """
    device = model_device(model)
    if device.type in UNSUPPORTED_DEVICES:
        raise UnsupportedModelError(
            f"the model is on {device}: {UNSUPPORTED_DEVICES[device.type]}; move it with "
            'model.to("cpu")'
        )
    call = _first_call(model, shape.tiered_layers[0], shape.kv)
    name, kv = type(model).__name__, shape.kv
    _, heads, _, width = call.keys.shape
    found = (call.query.shape[1], heads, width, call.values.shape[-1])
    promised = (kv.num_query_heads, kv.num_kv_heads, kv.head_dim, kv.value_width)
    if found != promised or call.values.shape[:3] != call.keys.shape[:3]:
        raise UnsupportedModelError(
            f"{name} attends with {found[0]} query heads, {found[1]} KV heads, and widths of "
            f"{found[2]} (keys) and {found[3]} (values); its configuration promises "
            f"{promised[0]}, {promised[1]}, {promised[2]} and {promised[3]}"
        )
    dtype = attention_dtype(call.keys)
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"{name} is in {dtype}; use float32, bfloat16 or float16")
    return replace(kv, dtype=dtype), call.keys.device


def _first_call(model: PreTrainedModel, layer: int, shape: KVShape) -> AttentionCall:
    """What the attention of a layer is called with."""
    name = type(model).__name__
    attachment = Attachment(model)
    try:
        cache = _LookingCache(model, layer, shape)
        cached_layers = len(cache.layers)
        ids = torch.ones(1, 2, dtype=torch.int64, device=model_device(model))
        chance = torch.random.fork_rng() if model.training else nullcontext()
        with torch.no_grad(), chance:
            model(input_ids=ids, **cache_argument(model, cache), use_cache=True)
    except _Seen as seen:
        if len(cache.layers) != cached_layers:
            raise UnsupportedModelError(
                f"{name} adds layers of its own to a cache; use this model without Penstock"
            ) from None
        if seen.same_values:
            return seen.call
    except (PenstockError, torch.OutOfMemoryError):
        raise
    except _FAULTS as fault:
        said = " ".join(str(fault).split())[:200]
        raise UnsupportedModelError(
            f"{name}'s own code does not work with Penstock's attention and mask "
            f"({type(fault).__name__}: {said}); use this model without Penstock"
        ) from fault
    finally:
        attachment.detach()
    if not cache.gave_keys:
        raise UnsupportedModelError(
            f"layer {layer} of {name} gave no keys to the cache; use this model without Penstock"
        )
    raise UnsupportedModelError(
        f"the attention function of {name} never received the keys and values that the cache "
        "handed out: the model transforms them in between, or attends by other means"
    )
