"""ResidentLayer: one layer's whole KV in fast memory (the full policy)."""

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.engine.layer import Layer
from penstock.engine.tiers.token_pool import copy_rows
from penstock.kernels.plain_attention import NEGATIVE_INFINITY


class ResidentLayer(Layer):
    """Preallocated keys and values; attention over views of them, nothing is ever re-copied."""

    def __init__(
        self, layer_idx: int, shape: KVShape, batch: int, max_tokens: int, device: torch.device
    ) -> None:
        self.layer_idx = layer_idx
        self.length = 0
        self._shape = shape
        self._keys, self._values = self._allocate(shape, batch, max_tokens, device)

    def _allocate(
        self, shape: KVShape, batch: int, max_tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Room for keys and values; both [batch, kv_heads, max_tokens, width]."""
        size = (batch, shape.num_kv_heads, max_tokens)
        keys = torch.empty(*size, shape.head_dim, dtype=shape.dtype, device=device)
        if shape.values_in_keys:
            return keys, keys[..., : shape.value_width]
        return keys, torch.empty(*size, shape.value_width, dtype=shape.dtype, device=device)

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        """Take the new tokens in and attend to everything.

        Returns:
            [batch, new_tokens, num_heads, head_dim]
        """
        start, end = self.length, self.length + call.keys.shape[2]
        self.append(call.keys, call.values, call.visible)
        mask = None
        if call.visible is not None and not bool(call.visible.all()):
            mask = torch.zeros(call.visible.shape, dtype=call.query.dtype, device=call.query.device)
            mask = mask.masked_fill_(~call.visible, NEGATIVE_INFINITY)
        total = AttentionSum(call)
        if end - start == 1:
            total.add(self._keys[:, :, :end], self._values[:, :, :end], mask)
            return total.result()
        new_mask = None if mask is None else mask[:, start:]
        total.add(call.keys, call.values, new_mask, causal=True)
        if start > 0:
            past_mask = None if mask is None else mask[:, :start]
            total.add(self._keys[:, :, :start], self._values[:, :, :start], past_mask)
        return total.result()

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Take new tokens in; both [batch, kv_heads, new_tokens, width]."""
        end = self.length + keys.shape[2]
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end

    @override
    def read_tokens(self, start: int, end: int) -> Tensor:
        """Keys and values of tokens that are held. [rows, end - start, *shape.token_size]"""
        keys, values = self._keys[:, :, start:end], self._values[:, :, start:end]
        return self._shape.tokens_of(keys.transpose(1, 2), values.transpose(1, 2))

    @override
    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""
        self.length = min(self.length, length)

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        assert isinstance(other, ResidentLayer)
        self.length = end = other.length
        parts = [(self._keys, other._keys)]
        if not self._shape.values_in_keys:
            parts.append((self._values, other._values))
        for mine, theirs in parts:
            copy_rows(mine[:, :, :end].transpose(1, 2), theirs[:, :, :end].transpose(1, 2), rows)

    @override
    def reset(self) -> None:
        """Forget every token."""
        self.length = 0

    @override
    def close(self) -> None:
        """Nothing to give back; memory goes with the object."""
