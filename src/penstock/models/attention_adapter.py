"""Our attention and mask functions, registered with transformers, and their use by one model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from penstock.core.errors import UnsupportedModelError
from penstock.core.on_device import on_device
from penstock.kernels.reference import add_attention_sink, attention_reference
from penstock.runtime.attention_call import AttentionCall

IMPLEMENTATION = "penstock"
"""The name under which transformers knows our attention; additive, nothing is replaced."""

_HANDLE = "_penstock_layer"
_UNMASKED = "_penstock_unmasked"
_PROBE = "_penstock_probe"
_USERS = "_penstock_users"


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

    @property
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


def mark_keys(
    keys: Tensor, attend: Callable[[AttentionCall], Tensor], *, unmasked: bool = False
) -> None:
    """Tell the attention function that gets these keys to call `attend`.

    Args:
        unmasked: whoever attends knows what each query sees (nothing is padded, and windows are
            its own business); the mask is not looked at.
    """
    setattr(keys, _HANDLE, attend)
    setattr(keys, _UNMASKED, unmasked)


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
        [batch, new_tokens, num_heads, head_dim], and no weights.
    """
    if hasattr(key, _PROBE):
        raise ProbeDone(query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    attend: Callable[[AttentionCall], Tensor] | None = getattr(key, _HANDLE, None)
    if attend is None:
        dense = attention_mask.dense() if isinstance(attention_mask, LazyMask) else attention_mask
        return _plain_attention(module, query, key, value, dense, scaling, dropout, kwargs)
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(
            "a 4D attention mask was given; Penstock takes the 2D padding mask of generate()"
        )
    visible = None
    if attention_mask is not None and not getattr(key, _UNMASKED):
        visible = attention_mask.padding
    with without_gradients(), on_device(query.device), without_autocast(query.device):
        query = query.to(key.dtype)
        call = AttentionCall(query, key, value, scaling, softcap, sinks, visible)
        return attend(call).contiguous(), None


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Layers that keep their own cache (sliding windows), and calls without one of ours."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    causal = mask is None and query.shape[2] > 1
    out, lse = attention_reference(
        query, key, value, scaling=scaling, mask=mask, causal=causal, softcap=softcap
    )
    if sinks is not None:
        out, _ = add_attention_sink(out, lse, sinks)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, penstock_attention)
AttentionMaskInterface.register(IMPLEMENTATION, LazyMask)


class Attachment:
    """One model's use of our attention function; `detach` puts the former one back.

    Several caches may share a model: the last one to leave restores it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Switch `model` over.

        Raises:
            UnsupportedModelError: the model did not take our attention function.
        """
        self._model: PreTrainedModel | None = model
        users: list[Any] = model.__dict__.setdefault(_USERS, [])
        if not users:
            users.append(model.config._attn_implementation)
            model.set_attn_implementation(IMPLEMENTATION)
        users.append(self)
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != IMPLEMENTATION:
            self.detach()
            raise UnsupportedModelError(
                f"{type(model).__name__} refused the {IMPLEMENTATION!r} attention function"
            )

    def detach(self) -> None:
        """Leave the model as it was; a second call does nothing."""
        model, self._model = self._model, None
        if model is None:
            return
        users: list[Any] = model.__dict__[_USERS]
        users.remove(self)
        if len(users) == 1:
            del model.__dict__[_USERS]
            model.set_attn_implementation(users[0])
