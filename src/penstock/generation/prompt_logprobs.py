"""PromptLogprobs: the logprobs of prompts, collected while they are read."""

from collections.abc import Sequence

from torch import Tensor

from penstock.generation.logprobs import LogprobsOnePosition, position_of, top_tokens
from penstock.generation.prompts import PromptBatch
from penstock.models.loader import Tokenizer

_LOGITS = 1 << 25
"""Logits of one chunk: 128 MiB in float32."""
_POSITIONS = 32
"""Positions whose logprobs are computed at a time, each as wide as the vocabulary."""
_CONTEXT = 4


class PromptLogprobs:
    """Takes the logits of a batch's prompts, a chunk at a time, and keeps what was asked for."""

    def __init__(
        self, batch: PromptBatch, counts: Sequence[int | None], tokenizer: Tokenizer | None
    ) -> None:
        """Begin with none.

        Args:
            counts: most probable tokens wanted per position, by row; -1: all; None: not of it.
        """
        self._batch, self._counts, self._tokenizer = batch, counts, tokenizer
        self.rows: list[list[LogprobsOnePosition | None] | None] = [
            None if count is None else [None] for count in counts
        ]
        """By row: by token of the prompt, the first is None; None: not asked for."""

    @property
    def is_wanted(self) -> bool:
        """Whether a row asks for any."""
        return any(count is not None for count in self._counts)

    def chunk(self, most: int, vocabulary: int) -> int:
        """Tokens of a chunk whose logits can be in memory together.

        Args:
            most: tokens of a chunk otherwise.
        """
        if not self.is_wanted:
            return most
        return max(2, min(most, _LOGITS // (len(self._counts) * vocabulary)))

    def take(self, begin: int, logits: Tensor) -> None:
        """Take the logits at a chunk's tokens.

        Args:
            begin: the chunk's first token, padding counted.
            logits: [rows, tokens, vocabulary]
        """
        for row, (count, ids) in enumerate(zip(self._counts, self._batch.token_ids, strict=True)):
            if count is not None:
                first = begin - (self._batch.padded_tokens - len(ids))
                self._take_row(row, first, logits[row], count)

    def _take_row(self, row: int, first: int, logits: Tensor, count: int) -> None:
        """Logits at tokens `first`, `first` + 1, ... of a prompt; below 0 they are padding."""
        ids, taken = self._batch.token_ids[row], self.rows[row]
        assert taken is not None
        end = min(first + logits.shape[0], len(ids) - 1)
        for at in range(max(first, 0), end, _POSITIONS):
            upto = min(at + _POSITIONS, end)
            wanted = ids[at + 1 : upto + 1]
            numbers = top_tokens(logits[at - first : upto - first], wanted, [count] * len(wanted))
            for token, each in enumerate(numbers, at + 1):
                before = ids[max(0, token - _CONTEXT) : token]
                taken.append(position_of(each, before, self._tokenizer))
