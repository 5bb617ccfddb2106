"""HeadRows: every KV head of a sequence as a row of its own, for methods that select per head."""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall


class HeadRows:
    """Folds KV heads into the batch at the runtime's border, and back.

    Everything inside then works on rows of one KV head: units, slots, selections and indexes are
    per head without knowing it. Row `b * kv_heads + h` is head h of sequence b. Methods whose units
    span all heads have one row a sequence, and nothing is folded.
    """

    def __init__(self, shape: KVShape, *, per_head: bool) -> None:
        self.per_sequence = shape.num_kv_heads if per_head else 1
        """Rows of one sequence."""
        self.shape = self._whole = shape
        """Of a row's cache."""
        if self.per_sequence > 1:
            self.shape = replace(
                shape, num_query_heads=shape.queries_per_kv_head, num_kv_heads=1
            )  # fmt: skip

    def fold(self, states: Tensor) -> Tensor:
        """Queries, keys or values by row.

        Args:
            states: [batch, heads, ...], query or KV heads.

        Returns:
            [rows, heads of a row, ...]
        """
        if self.per_sequence == 1:
            return states
        batch, heads = states.shape[:2]
        return states.reshape(
            batch * self.per_sequence, heads // self.per_sequence, *states.shape[2:]
        )  # fmt: skip

    def fold_call(self, call: AttentionCall) -> AttentionCall:
        """The same call by row."""
        if self.per_sequence == 1:
            return call
        sinks = call.sink_logits
        if sinks is not None:
            sinks = sinks.view(1, -1).expand(call.query.shape[0], -1)
            sinks = self.fold(sinks)
        keys, values, visible = self.fold_tokens(call.keys, call.values, call.visible)
        return replace(
            call, query=self.fold(call.query), keys=keys, values=values, sink_logits=sinks,
            visible=visible,
        )  # fmt: skip

    def fold_tokens(
        self, keys: Tensor, values: Tensor, visible: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and visibility of new tokens by row."""
        if visible is not None:
            visible = visible.repeat_interleave(self.per_sequence, dim=0)
        return self.fold(keys), self.fold(values), visible

    def unfold(self, out: Tensor) -> Tensor:
        """An attention output by sequence.

        Args:
            out: [rows, new_tokens, query heads of a row, value_width]

        Returns:
            [batch, new_tokens, num_heads, value_width]
        """
        if self.per_sequence == 1:
            return out
        rows, tokens, heads, width = out.shape
        by_sequence = out.view(rows // self.per_sequence, self.per_sequence, tokens, heads, -1)
        return by_sequence.transpose(1, 2).reshape(
            rows // self.per_sequence, tokens, self.per_sequence * heads, width
        )  # fmt: skip

    def unfold_tokens(self, tokens: Tensor) -> Tensor:
        """Keys and values by sequence.

        Args:
            tokens: [rows, tokens, *token_size of a row]

        Returns:
            [batch, tokens, *token_size]
        """
        if self.per_sequence == 1:
            return tokens
        parts = (self.shape.keys_of(tokens), self.shape.values_of(tokens))
        by_row = [
            each.reshape(-1, self.per_sequence, each.shape[1], each.shape[3]) for each in parts
        ]
        return self._whole.tokens_of(*(each.transpose(1, 2) for each in by_row))

    def of(self, sequences: Tensor) -> Tensor:
        """Rows of some sequences, in their order. int64 [sequences * per_sequence]"""
        if self.per_sequence == 1:
            return sequences
        heads = torch.arange(self.per_sequence, device=sequences.device)
        return (sequences[:, None] * self.per_sequence + heads).flatten()
