"""AnswerWatch: follows the new tokens of a batch, streams their text and ends each answer."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.generation.output import FinishReason
from penstock.generation.sampling import SamplingParams
from penstock.generation.token_text import text_of
from penstock.models.loader import Tokenizer

OnText = Callable[[int, str], None]
"""Called with the row of the prompt and the next piece of its answer."""


class AnswerText:
    """Turns one answer's tokens into text, piece by piece, and looks out for stop strings.

    A token's text can depend on its neighbours (spaces, bytes of one character), so a piece is the
    difference between two decodings of a short tail, without a last character that is incomplete,
    and held back while it may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = stop_texts
        self._tail: list[int] = []
        self._tail_text = ""
        self._num_decoded = 0  # leading tokens of the tail whose text `_tail_text` begins with
        self._held = ""
        self.text = ""
        """Everything released so far."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; returns the text it releases and whether a stop string was met."""
        if self._tokenizer is None:
            return "", False
        self._tail.append(token_id)
        decoded = self._decode(self._tail)
        # A token without a text (a special one) is no neighbour: behind it alone, the next word
        # would lose the space in front of it.
        whole = decoded.rstrip("\ufffd")
        if len(whole) <= len(self._tail_text):
            return "", False
        self._held += whole[len(self._tail_text) :]
        if whole == decoded:
            self._tail = self._tail[self._num_decoded :]
            self._num_decoded = len(self._tail)
            self._tail_text = self._decode(self._tail)
        else:
            self._tail_text = whole
        return self._release()

    def finish(self) -> str:
        """Release what was held back; the answer is over."""
        rest, self._held = self._held, ""
        if self._tokenizer is not None:
            rest += self._decode(self._tail)[len(self._tail_text) :]
        self.text += rest
        return rest

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return text_of(self._tokenizer, ids)

    def _release(self) -> tuple[str, bool]:
        ends = [at for stop in self._stop_texts if (at := self._held.find(stop)) >= 0]
        if ends:
            piece, self._held = self._held[: min(ends)], ""
            self.text += piece
            return piece, True
        keep = max((_overlap(self._held, stop) for stop in self._stop_texts), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        self.text += piece
        return piece, False


class AnswerWatch:
    """A stopping criterion for `generate` that is told every new token, right after its choice.

    It keeps the answers itself, because `generate` pads the rows that end early. One object
    serves one call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        num_rows: int,
        end_token_ids: frozenset[int],
        on_text: OnText | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._params = params
        self._should_stop = should_stop
        self._end_token_ids = end_token_ids
        self._on_text = on_text
        self._texts = [AnswerText(tokenizer, params.stop_texts) for _ in range(num_rows)]
        self.token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.finish_reasons: list[FinishReason | None] = [None] * num_rows
        self.first_token_s = 0.0
        """`time.perf_counter()` when the first token was known."""
        self.last_token_s = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Take the newest token of each row; returns which rows are done. bool [batch]"""
        del scores, kwargs
        newest = input_ids[:, -1].tolist()
        self.last_token_s = time.perf_counter()
        if not self.first_token_s:
            self.first_token_s = self.last_token_s
        for row, token_id in enumerate(newest):
            if self.finish_reasons[row] is None:
                self.finish_reasons[row] = self._take(row, token_id)
        if self._should_stop():
            self._end_as("abort")
        done = [reason is not None for reason in self.finish_reasons]
        return torch.tensor(done, device=input_ids.device)

    def end(self) -> None:
        """Release what rows hold back that something else has ended (a limit of time, say)."""
        self._end_as("length")

    def _end_as(self, why: FinishReason) -> None:
        for row, reason in enumerate(self.finish_reasons):
            if reason is None:
                self.finish_reasons[row] = why
                self._tell(row, self._texts[row].finish())

    def text(self, row: int) -> str:
        """The answer of one row."""
        return self._texts[row].text

    def _take(self, row: int, token_id: int) -> FinishReason | None:
        ids, text = self.token_ids[row], self._texts[row]
        ids.append(token_id)
        if token_id in self._end_token_ids:
            self._tell(row, text.finish())
            return "stop"
        piece, stopped = text.push(token_id)
        self._tell(row, piece)
        if stopped:
            return "stop"
        if len(ids) >= self._params.max_tokens:
            self._tell(row, text.finish())
            return "length"
        return None

    def _tell(self, row: int, piece: str) -> None:
        if piece and self._on_text is not None:
            self._on_text(row, piece)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
