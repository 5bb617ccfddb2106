"""Multi-head latent attention (DeepSeek-V2, section 2.1): layers that cache one latent a token.

Since transformers 5.17 such a layer gives its cache the latent and the rotated part of the key that
all heads share, and makes keys and values of what the cache returns (`expand_kv`). The tiers keep
latent and rotated part side by side, as the key of one KV head; its value is the latent. Queries
are moved into the latents' space, and outputs out of it, so that nothing of the past is expanded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import UnsupportedModelError
from penstock.core.shape import KVShape
from penstock.models.weight_access import is_plain

_NEAR = 0.02
"""Largest difference of expanded keys, or values, as a share of the largest one."""


@dataclass(frozen=True, slots=True)
class Latents:
    """New tokens as the tiers keep them."""

    keys: Tensor
    """[batch, 1, new_tokens, head_dim]"""
    values: Tensor
    """Its first channels. [batch, 1, new_tokens, value_width]"""
    checked: bool = False
    """Whether what the layer makes of them is compared with what `LatentWeights` says."""


class ExpandedKeys(Tensor):
    """What a layer makes of latents on its way to attention; says which latents these are."""

    latents: Latents

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any function of torch; what it returns knows the latents too."""
        out = super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, kwargs or {}
        )
        latents = next(filter(None, map(_latents_in, args)), None)
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, cls) and latents is not None:
                each.latents = latents
        return out


def _latents_in(argument: Any) -> Latents | None:
    for each in argument if isinstance(argument, tuple | list) else (argument,):
        if isinstance(each, ExpandedKeys):
            found: Latents | None = each.__dict__.get("latents")
            return found
    return None


def caches_latents(module: nn.Module) -> bool:
    """Whether attention in a module expands what its cache returns."""
    return any(hasattr(part, "expand_kv") for part in module.modules())


def joined(shape: KVShape, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer gives its cache, as keys and values of `shape`.

    Args:
        keys: latents, where values lie in keys; both [batch, heads, new_tokens, width].
        values: the rotated part then.
    """
    if not shape.values_in_keys:
        return keys, values
    whole = torch.cat((keys, values), dim=-1)
    return whole, whole[..., : keys.shape[-1]]


def returned(
    shape: KVShape, given: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, *,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a cache's `update` returns for keys that were marked.

    Args:
        given: what the layer gave, or what a plain cache made of it.
        keys, values: the same as `joined` has it, in the dtype of attention.
        checked: see `Latents`.
    """
    if not shape.values_in_keys:
        return keys, values
    return handed_out(given[0], Latents(keys, values, checked)), given[1]


def handed_out(given: Tensor, latents: Latents) -> Tensor:
    """The latents that a layer gave its cache, for it to expand."""
    keys: ExpandedKeys = given.detach().as_subclass(ExpandedKeys)
    keys.latents = latents
    return keys


class LatentWeights:
    """The one linear layer that makes keys and values of latents, head by head."""

    def __init__(self, module: nn.Module, heads: int, dtype: torch.dtype) -> None:
        """Look at an attention module.

        Raises:
            UnsupportedModelError: it has no such layer whose weights can be read.
        """
        attention: Any = module
        linear: Any = getattr(attention, "kv_b_proj", None)
        plain = type(linear) is nn.Linear and is_plain(linear)
        if not plain or linear.bias is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} does not expand its latents by a linear layer whose "
                "weights are in memory as they are (kv_b_proj); load the model unquantised and "
                "not offloaded, or use it without Penstock"
            )
        whole: Tensor = linear.weight.detach().to(dtype)
        weight, self._nope = whole.view(heads, -1, whole.shape[1]), int(attention.qk_nope_head_dim)
        self._to_keys, self._to_values = weight[:, : self._nope], weight[:, self._nope :]

    def query(self, query: Tensor) -> Tensor:
        """A query whose products with latents are those with the expanded keys.

        Args:
            query: [batch, heads, new_tokens, width of an expanded key]

        Returns:
            [batch, heads, new_tokens, head_dim of the latents]
        """
        plain, rotated = query[..., : self._nope], query[..., self._nope :]
        return torch.cat((torch.matmul(plain, self._to_keys), rotated), dim=-1)

    def expanded(self, latents: Latents) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads. [batch, heads, new_tokens, their width]"""
        shared, width = latents.values.to(self._to_keys.dtype), latents.values.shape[-1]
        plain = torch.matmul(shared, self._to_keys.transpose(1, 2))
        rotated = latents.keys[..., width:].expand(-1, plain.shape[1], -1, -1)
        values = torch.matmul(shared, self._to_values.transpose(1, 2))
        return torch.cat((plain, rotated.to(plain.dtype)), dim=-1), values

    def output(self, out: Tensor) -> Tensor:
        """What attention to latents says of values.

        Args:
            out: [batch, new_tokens, heads, value_width of the latents]

        Returns:
            [batch, new_tokens, heads, width of an expanded value]
        """
        by_head = out.transpose(1, 2)
        if out.shape[1] == 1:  # rows of a transposed bfloat16 matrix are slow for one token
            return torch.matmul(self._to_values, by_head.transpose(2, 3)).permute(0, 3, 1, 2)
        return torch.matmul(by_head, self._to_values.transpose(1, 2)).transpose(1, 2)


def in_latents(
    module: nn.Module, query: Tensor, keys: ExpandedKeys, values: Tensor
) -> tuple[LatentWeights, Tensor, Latents]:
    """A layer's call of attention, moved to its latents.

    Args:
        query: [batch, heads, new_tokens, width of an expanded key]
        keys: that the layer made of what `handed_out` gave it.
        values: likewise.

    Returns:
        The layer's weights, the query among latents, and the latents.

    Raises:
        UnsupportedModelError: see `LatentWeights`; or what the layer makes is something else.
    """
    latents, query = keys.latents, query.as_subclass(Tensor)
    weights = LatentWeights(module, query.shape[1], query.dtype)
    if latents.checked:
        for made, expected in zip(weights.expanded(latents), (keys, values), strict=True):
            plain = expected.as_subclass(Tensor)
            if made.shape != plain.shape or not _is_near(made, plain):
                raise UnsupportedModelError(
                    f"{type(module).__name__} does more with its latents than one linear layer "
                    "says; use this model without Penstock"
                )
    return weights, weights.query(query), latents


def _is_near(made: Tensor, expected: Tensor) -> bool:
    apart = (made.float() - expected.float()).abs().max()
    return bool(apart <= _NEAR * expected.float().abs().max())
