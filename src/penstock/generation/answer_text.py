"""AnswerText: one answer's tokens as text, piece by piece, up to a stop string."""

from collections.abc import Sequence

from penstock.generation.sampling import SamplingParams
from penstock.generation.token_text import text_of
from penstock.models.loader import Tokenizer


class AnswerText:
    """Turns one answer's tokens into text, piece by piece, and looks out for stop strings.

    A token's text can depend on its neighbours (spaces, bytes of one character), so a piece is the
    difference between two decodings of a short tail, without a last character that is incomplete,
    and held back while it may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        """Begin an answer.

        Args:
            tokenizer: None: there is no text.
        """
        self._tokenizer = tokenizer if params.detokenize else None
        self._stop_texts = params.stop_texts
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._skips_special = params.skip_special_tokens
        joins = not (params.skip_special_tokens or params.spaces_between_special_tokens)
        self._special = frozenset(
            self._tokenizer.all_special_ids if joins and self._tokenizer is not None else ()
        )
        self._is_behind_special = False
        self._tail: list[int] = []
        self._tail_text = ""
        self._num_decoded = 0  # leading tokens of the tail whose text `_tail_text` begins with
        self._held = ""
        self._num_tokens = 0
        self._num_safe = 0  # characters held that are no part of a stop string
        self.text = ""
        """Everything released so far."""
        self.stopped_by: str | None = None
        """The stop string that was met."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it releases."""
        if self._tokenizer is None:
            return ""
        self._num_tokens += 1
        new = self._decoded(token_id)
        if self._special and self._is_special_again(token_id):
            new = new.lstrip(" ")
        self._held += new
        if self._num_tokens <= self._min_tokens:
            self._num_safe = len(self._held)
        return self._release() if new else ""

    def finish(self) -> str:
        """Release what was held back; the answer is over."""
        rest, self._held = self._held, ""
        if self._tokenizer is not None:
            rest += self._decode(self._tail)[len(self._tail_text) :]
        self.text += rest
        return rest

    def _decoded(self, token_id: int) -> str:
        """The text that a token adds to those in front."""
        self._tail.append(token_id)
        decoded = self._decode(self._tail)
        # A token without a text (a special one) is no neighbour: behind it alone, the next word
        # would lose the space in front of it.
        whole = decoded.rstrip("\ufffd")
        if len(whole) <= len(self._tail_text):
            return ""
        new = whole[len(self._tail_text) :]
        if whole == decoded:
            self._tail = self._tail[self._num_decoded :]
            self._num_decoded = len(self._tail)
            self._tail_text = self._decode(self._tail)
        else:
            self._tail_text = whole
        return new

    def _is_special_again(self, token_id: int) -> bool:
        """Whether it is a special token behind another; called for each token in turn."""
        was, self._is_behind_special = self._is_behind_special, token_id in self._special
        return was and self._is_behind_special

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return text_of(self._tokenizer, ids, skip_special_tokens=self._skips_special)

    def _release(self) -> str:
        found = [
            (at + len(stop), number)
            for number, stop in enumerate(self._stop_texts)
            if (at := self._held.find(stop, max(0, self._num_safe + 1 - len(stop)))) >= 0
        ]
        if found and self._num_tokens > self._min_tokens:
            end, number = min(found)
            self.stopped_by = self._stop_texts[number]
            end -= 0 if self._keeps_stop else len(self.stopped_by)
            piece, self._held = self._held[:end], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop_texts), default=0)
            cut = len(self._held) - keep
            piece, self._held = self._held[:cut], self._held[cut:]
            self._num_safe = max(0, self._num_safe - cut)
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def stops_with(params: SamplingParams, own: Sequence[str]) -> SamplingParams:
    """Settings with the stop strings that a model's own generation config has."""
    made = params.clone()
    if params.detokenize and own:
        made.stop = (*params.stop_texts, *own)
    return made
