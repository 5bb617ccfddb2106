"""PromptChunk: several new tokens of one sequence attend over its blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.kernels.plain_attention import add_attention_sink, attention_twin

_RUN_BLOCKS = 64
"""Blocks that are gathered at once."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens of a prompt; their blocks have slots already."""

    table: Tensor
    """Slots of the sequence's blocks. int64 [blocks]"""
    past: int
    """Tokens before the chunk."""
    block_tokens: int

    def attend(self, slots: Tensor, call: AttentionCall, window: int | None) -> Tensor:
        """Write the chunk's keys and values to its slots and attend.

        Args:
            slots: one layer of fast memory. [slots, 2, kv_heads, block_tokens, head_dim]
            call: one row.
            window: tokens that a query sees, itself included; None for all.

        Returns:
            [1, new_tokens, num_heads, head_dim]
        """
        assert call.query.shape[0] == 1, "a prompt is one sequence"
        new = call.keys.shape[2]
        positions = torch.arange(self.past, self.past + new, device=slots.device)
        rows, offsets = self.table[positions // self.block_tokens], positions % self.block_tokens
        slots[rows, 0, :, offsets] = call.keys[0].transpose(0, 1)
        slots[rows, 1, :, offsets] = call.values[0].transpose(0, 1)
        if window is not None and self.past + new > window:
            return self._windowed(slots, call, window)
        sums = AttentionSum(call)
        for first in range(0, self.past, _RUN_BLOCKS * self.block_tokens):
            end = min(self.past, first + _RUN_BLOCKS * self.block_tokens)
            sums.add(*self._tokens(slots, first, end), None)
        sums.add(call.keys, call.values, None, causal=True)
        return sums.result()

    def _windowed(self, slots: Tensor, call: AttentionCall, window: int) -> Tensor:
        """Every query sees the `window` tokens up to its own."""
        new, first = call.keys.shape[2], max(0, self.past + 1 - window)
        first -= first % self.block_tokens
        keys, values = self._tokens(slots, first, self.past + new)
        queries = torch.arange(self.past, self.past + new, device=slots.device)[:, None]
        tokens = torch.arange(first, self.past + new, device=slots.device)
        out, lse = attention_twin(
            call.query, keys, values, scaling=call.scaling, softcap=call.softcap,
            mask=(tokens <= queries) & (tokens > queries - window),
        )  # fmt: skip
        if call.sink_logits is not None:
            out, _ = add_attention_sink(out, lse, call.sink_logits)
        return out.to(call.query.dtype).transpose(1, 2)

    def _tokens(self, slots: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens [first, end); `first` begins a block.

        Returns:
            Two of [1, kv_heads, end - first, head_dim].
        """
        blocks = self.table[first // self.block_tokens : -(-end // self.block_tokens)]
        pieces = slots[blocks].permute(1, 2, 0, 3, 4)  # [2, kv_heads, blocks, tokens, head_dim]
        flat = pieces.reshape(2, slots.shape[2], -1, slots.shape[4])[:, :, : end - first]
        return flat[None, 0], flat[None, 1]
