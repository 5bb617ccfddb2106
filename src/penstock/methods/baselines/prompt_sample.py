"""PromptSample: evenly spaced keys of a prompt whose length is not known beforehand."""

import torch
from torch import Tensor

LARGEST_TOKENS = 8192
SMALLEST_TOKENS = 512
SHARE = 8
"""A sample holds one token of so many that a cache may hold, between the limits above."""


class PromptSample:
    """Keeps every 2^n-th key that passes by, with n as small as the room allows."""

    def __init__(self, rows: int, max_tokens: int, head_dim: int, like: Tensor) -> None:
        """Allocate the room for a cache of at most `max_tokens` tokens.

        Args:
            like: a tensor of the dtype and on the device of the keys.
        """
        self._room = like.new_empty(rows, self.most_tokens(max_tokens), head_dim)
        self._stride = 1
        self.end = 0
        """Tokens that have passed by."""

    @staticmethod
    def most_tokens(max_tokens: int) -> int:
        """Keys that a sample holds at most."""
        return min(max_tokens, LARGEST_TOKENS, max(SMALLEST_TOKENS, max_tokens // SHARE))

    @classmethod
    def num_bytes(cls, rows: int, max_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of a sample, for the ledger."""
        return rows * cls.most_tokens(max_tokens) * head_dim * dtype.itemsize

    def take(self, keys: Tensor, first_token: int) -> None:
        """Let some keys pass by.

        Args:
            keys: [rows, tokens, head_dim]
            first_token: position of the first of them; at or after all that have passed.
        """
        held, end = len(range(0, self.end, self._stride)), first_token + keys.shape[1]
        while (end - 1) // self._stride >= self._room.shape[1]:
            self._stride *= 2
            held = self._halve(held)
        skipped = -first_token % self._stride
        chosen = keys[:, skipped :: self._stride]
        first = (first_token + skipped) // self._stride
        self._room[:, first : first + chosen.shape[1]] = chosen
        self.end = end

    def _halve(self, held: int) -> int:
        """Keep every second of `held` keys, in place; returns how many those are."""
        fewer, first = (held + 1) // 2, 1
        # What moves to [n, 2n) comes from [2n, 4n), which does not overlap.
        while first < fewer:
            end = min(2 * first, fewer)
            self._room[:, first:end] = self._room[:, 2 * first : 2 * end : 2]
            first = end
        return fewer

    @property
    def keys(self) -> Tensor:
        """The sample. [rows, tokens, head_dim]"""
        return self._room[:, : len(range(0, self.end, self._stride))]
