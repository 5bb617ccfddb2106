"""KVShape: layers, heads, widths, dtype, and the bytes and layout of a token that follow."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """The shape of one model's tiered KV cache (its full-attention layers only).

    A token's keys and values lie side by side, keys of all heads first. Where values are as wide as
    keys, tokens are [..., 2, kv_heads, head_dim]; where not, they are flat, [..., elements].
    """

    num_layers: int
    """Full-attention layers, the ones that go through tiers."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head's keys, and of its values if nothing else is said."""
    dtype: torch.dtype
    value_dim: int | None = None
    """Width of a head's values; None: as wide as keys."""
    values_in_keys: bool = False
    """A value is the first `value_dim` channels of its key, and has no room of its own (latent
    attention: the latent is both)."""

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def is_even(self) -> bool:
        """Whether tokens are [..., 2, kv_heads, head_dim], which the compiled kernels know."""
        return self.value_width == self.head_dim and not self.values_in_keys

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head (1 for MHA)."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def joint_dim(self) -> int:
        """Width of the keys of one token, all KV heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.token_elements * self.dtype.itemsize

    @property
    def token_elements(self) -> int:
        """Numbers that K and V of one token in one layer are."""
        values = 0 if self.values_in_keys else self.num_kv_heads * self.value_width
        return self.joint_dim + values

    @property
    def token_size(self) -> tuple[int, ...]:
        """Dimensions of one token's K and V."""
        if self.is_even:
            return 2, self.num_kv_heads, self.head_dim
        return (self.token_elements,)

    def padding_bytes(self, tokens: int) -> int:
        """Bytes of what attention makes of the narrower ones of a layer's keys and values, as wide
        as the others, for so many tokens at once."""
        if self.is_even or self.values_in_keys:
            return 0
        width = max(self.head_dim, self.value_width)
        return tokens * self.num_kv_heads * width * self.dtype.itemsize

    def keys_of(self, tokens: Tensor) -> Tensor:
        """The keys among tokens, a view. [..., *token_size] to [..., kv_heads, head_dim]"""
        if self.is_even:
            return tokens[..., 0, :, :]
        keys = tokens[..., : self.joint_dim]
        return keys.view(*keys.shape[:-1], self.num_kv_heads, self.head_dim)

    def values_of(self, tokens: Tensor) -> Tensor:
        """The values among tokens, a view. [..., *token_size] to [..., kv_heads, value_width]"""
        if self.is_even:
            return tokens[..., 1, :, :]
        if self.values_in_keys:
            return self.keys_of(tokens)[..., : self.value_width]
        values = tokens[..., self.joint_dim :]
        return values.view(*values.shape[:-1], self.num_kv_heads, self.value_width)

    def tokens_of(self, keys: Tensor, values: Tensor) -> Tensor:
        """Tokens with copies of these keys and values; the inverse of `keys_of` and `values_of`."""
        if self.is_even:
            return torch.stack((keys, values), dim=-3)
        tokens = keys.new_empty(*keys.shape[:-2], *self.token_size)
        self.keys_of(tokens).copy_(keys)
        if not self.values_in_keys:
            self.values_of(tokens).copy_(values)
        return tokens

    def of_layers(self, num_layers: int) -> "KVShape":
        """The same shape with so many layers."""
        return replace(self, num_layers=num_layers)

    def full_cache_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of the whole cache, all layers, for `batch` sequences of `tokens` tokens."""
        return self.num_layers * batch * tokens * self.token_bytes
