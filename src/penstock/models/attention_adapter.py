"""Our attention and mask functions, registered with transformers, and their use by one model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from penstock.core.errors import UnsupportedModelError
from penstock.core.on_device import on_device
from penstock.engine.attention_call import AttentionCall
from penstock.kernels.plain_attention import add_attention_sink, attention_twin
from penstock.models.latents import ExpandedKeys, in_latents
from penstock.models.shared_part import SharedPart, Undo

IMPLEMENTATION = "penstock"
"""The name under which transformers knows our attention; additive, nothing is replaced."""

_MARK = "_penstock_mark"
_PROBE = "_penstock_probe"
_WINDOW = "_penstock_window"


class ProbeDone(Exception):
    """Carries a query out of a layer's forward; see `QueryProjection`."""

    def __init__(self, query: Tensor) -> None:
        super().__init__()
        self.query = query


class LazyMask:
    """The arguments of a mask, evaluated only by those who need it dense.

    transformers passes whatever the mask function returns on to the attention function. Tiered
    layers need the padding alone; a dense [queries, keys] mask over a long past is never built.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    @cached_property
    def padding(self) -> Tensor | None:
        """False at padding; None when nothing is padded. bool [batch, tokens]

        Raises:
            UnsupportedModelError: the mask is more than causal plus padding.
        """
        if self._arguments["mask_function"] is not causal_mask_function:
            raise UnsupportedModelError(
                "this model's full-attention layers use a custom mask (for example image blocks "
                "that see each other); only causal masks with padding can be streamed"
            )
        mask = self._arguments.get("attention_mask")
        if mask is None or bool(mask.all()):
            return None
        padding: Tensor = mask[:, : self._arguments["kv_length"]]
        return padding

    def dense(self) -> Tensor | None:
        """The mask as transformers' own SDPA path would have it."""
        mask: Tensor | None = sdpa_mask(**self._arguments)
        return mask

    def _additive(self) -> Tensor:
        """0 where a query sees a key, the dtype's least number elsewhere. [batch, 1, new, keys]"""
        skips = {name: False for name in self._arguments if name.endswith("_skip")}
        shown: Tensor = sdpa_mask(**{**self._arguments, **skips})
        dtype = self._arguments.get("dtype", torch.float32)
        mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device)
        return mask.masked_fill_(~shown, torch.finfo(dtype).min)

    # A forward pass without a cache of ours may begin under our name and go on under another: the
    # last cache of its model closes in another thread. To those functions this is a tensor.

    @property
    def shape(self) -> torch.Size:
        """Of the mask as a tensor. [batch, 1, new tokens, keys]"""
        return self._additive().shape

    @property
    def ndim(self) -> int:
        """Of the mask as a tensor."""
        return 4

    def __getitem__(self, index: Any) -> Tensor:
        return self._additive()[index]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take part in any function of torch, as an additive mask."""
        args = [each._additive() if isinstance(each, cls) else each for each in args]
        named = {
            name: each._additive() if isinstance(each, cls) else each
            for name, each in (kwargs or {}).items()
        }
        return func(*args, **named)


def _nothing() -> None:
    """What a mark does without a callback."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the attention function finds on keys."""

    attend: Callable[[AttentionCall], Tensor]
    unmasked: bool
    received: Callable[[], None]
    failed: Callable[[], None]


def mark_keys(
    keys: Tensor, attend: Callable[[AttentionCall], Tensor], *, unmasked: bool = False,
    received: Callable[[], None] = _nothing, failed: Callable[[], None] = _nothing,
) -> None:  # fmt: skip
    """Tell the attention function that gets these keys to call `attend`.

    Args:
        unmasked: the runtime knows what each query sees (nothing is padded, and windows are
            its own business); the mask is not looked at.
        received: called as soon as the attention function has the keys.
        failed: called when it refused them, or `attend` raised.
    """
    setattr(keys, _MARK, _Mark(attend, unmasked, received, failed))


def mark_window(keys: Tensor, failed: Callable[[], None]) -> None:
    """Have `failed` called where the attention function cannot attend to a window's keys.

    Args:
        failed: a method; its object is not kept alive by the keys.
    """
    setattr(keys, _WINDOW, WeakMethod(failed))


def mark_probe(keys: Tensor) -> None:
    """Make the attention function that gets these keys raise `ProbeDone` with its query."""
    setattr(keys, _PROBE, True)


def attention_dtype(keys: Tensor) -> torch.dtype:
    """In which attention takes keys: their own dtype, or autocast's where it is on."""
    kind = keys.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else keys.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off, where it is on: what the tiers compute has the dtypes that they chose."""
    if not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


_NOTHING: AbstractContextManager[None] = nullcontext()


def without_gradients() -> AbstractContextManager[None]:
    """`torch.no_grad()`, which is dear between two layers, where it is not on already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def penstock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the cache that marked `key`; without a mark, as SDPA does.

    Args:
        query: post-RoPE. [batch, num_heads, new_tokens, head_dim]
        key: the new tokens' keys when marked, all of them otherwise.
        value: like `key`.
        attention_mask: a `LazyMask`, or None.
        scaling: factor on the logits; None for head_dim ** -0.5.

    Returns:
        [batch, new_tokens, num_heads, width of a value], and no weights.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, ExpandedKeys):
        weights, query, latents = in_latents(module, query, key, value)
        among, _ = penstock_attention(
            module, query, latents.keys, latents.values, attention_mask, scaling, dropout, **kwargs
        )
        return weights.output(among).contiguous(), None
    if hasattr(key, _PROBE):
        raise ProbeDone(query)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    mark: _Mark | None = getattr(key, _MARK, None)
    if mark is None:
        window: Callable[[], Callable[[], None] | None] | None = getattr(key, _WINDOW, None)
        try:
            if window is not None:
                _refuse_dense(attention_mask)
            return _plain_attention(
                module, query, key, value, attention_mask, scaling, dropout, kwargs
            )
        except BaseException:
            failed = None if window is None else window()
            if failed is not None:
                failed()
            raise
    mark.received()
    try:
        _refuse_dense(attention_mask)
        if kwargs.get("position_bias") is not None:
            raise UnsupportedModelError(
                "this model adds a bias of its own to the products of queries and keys, which is "
                "not streamed; use it without Penstock"
            )
        visible = None
        if isinstance(attention_mask, LazyMask) and not mark.unmasked:
            visible = attention_mask.padding
        with without_gradients(), on_device(query.device), without_autocast(query.device):
            query = query.to(key.dtype)
            call = AttentionCall(query, key, value, scaling, softcap, sinks, visible)
            return mark.attend(call).contiguous(), None
    except BaseException:
        mark.failed()
        raise


def _refuse_dense(mask: LazyMask | Tensor | None) -> None:
    if isinstance(mask, Tensor):
        raise UnsupportedModelError(
            "a 4D attention mask was given; Penstock takes the 2D padding mask of generate()"
        )


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: LazyMask | Tensor | None,
    scaling: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Layers that keep their own cache (sliding windows), and calls without one of ours."""
    if isinstance(mask, LazyMask):
        mask = mask.dense()
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    causal = mask is None and query.shape[2] > 1
    out, lse = attention_twin(
        query, key, value, scaling=scaling, mask=mask, causal=causal, softcap=softcap
    )
    if sinks is not None:
        out, _ = add_attention_sink(out, lse, sinks)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, penstock_attention)
AttentionMaskInterface.register(IMPLEMENTATION, LazyMask)


class Attachment:
    """One model's use of our attention function; `detach` puts the former one back.

    Several caches may share a model, in several threads: the last one to leave restores it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Switch `model` over.

        Raises:
            UnsupportedModelError: the model did not take our attention function.
        """
        self._part = SharedPart(model, "attention", partial(_switch, model))
        if model.config.get_text_config(decoder=True)._attn_implementation != IMPLEMENTATION:
            self.detach()
            raise UnsupportedModelError(
                f"{type(model).__name__} refused the {IMPLEMENTATION!r} attention function"
            )

    def detach(self) -> None:
        """Leave the model as it was; a second call does nothing."""
        self._part.leave()


def _switch(model: PreTrainedModel) -> Undo:
    former = [(config, config._attn_implementation) for config in _configs(model)]

    def undo() -> None:
        model.set_attn_implementation(former[0][1])
        for config, name in former:
            if config._attn_implementation != name:  # sets those within it too, which follow
                config._attn_implementation = name

    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except BaseException:
        undo()
        raise
    return undo


def _configs(model: PreTrainedModel) -> list[Any]:
    """A model's configuration and those within it, outer ones first."""
    found = [model.config]
    for config in found:
        parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
        found += [each for each in parts if each is not None and all(each is not x for x in found)]
    return found
