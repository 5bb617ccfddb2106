"""StepTexts: the text of beams, and which token ends a step or a beam."""

from collections.abc import Sequence

from penstock.generation.token_text import text_of
from penstock.models.loader import Tokenizer

_TOKENS_PER_CHARACTER = 4
"""Most tokens that one character is spread over, as bytes of UTF-8 are."""
_MARGIN_TOKENS = 8


class StepTexts:
    """Knows the text behind the prompt, and looks out for a delimiter and stop strings in it.

    Holds nothing about a beam, so that beams can fork at will: a token completes a text if that
    occurs once more with the token than without it, in the last few tokens' decoding. Decoding
    at every token would take longer than a small model itself; most tokens are ruled out by what
    they look like alone, which is decided once per token of the vocabulary.

    Args:
        tokenizer: None knows no text; then there must be nothing to look out for.
        delimiter: ends a step.
        stop_texts: end a beam.
        end_token_ids: end a beam as well.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        delimiter: str | None = None,
        stop_texts: Sequence[str] = (),
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._delimiters = [] if delimiter is None else [delimiter]
        self._stop_texts = list(stop_texts)
        self._end_token_ids = end_token_ids
        watched = [*self._delimiters, *self._stop_texts]
        assert tokenizer is not None or not watched, "text is not known without a tokenizer"
        self._last_characters = {text[-1] for text in watched}
        # A space in front of a word can be dropped when its token is decoded alone.
        self._rules_out = not any(character.isspace() and character != "\n"
                                  for character in self._last_characters)  # fmt: skip
        self.window = _MARGIN_TOKENS + _TOKENS_PER_CHARACTER * max(map(len, watched), default=0)
        """Tokens at the end of a beam that decide whether its last one completes anything."""
        self._may_complete: dict[int, bool] = {}

    @property
    def watches(self) -> bool:
        """Whether anything but its length can end a step."""
        return bool(self._end_token_ids or self._last_characters)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return text_of(self._tokenizer, token_ids)

    def answer(self, token_ids: Sequence[int]) -> str:
        """The text behind the prompt, up to the first stop string."""
        text = self.decode(token_ids)
        return text[: min((at for stop in self._stop_texts if (at := text.find(stop)) >= 0),
                          default=len(text))]  # fmt: skip

    def ends_beam(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of a beam's tokens finishes it."""
        return token_ids[-1] in self._end_token_ids or self._completes(token_ids, self._stop_texts)

    def ends_step(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of a beam's tokens completes the delimiter."""
        return self._completes(token_ids, self._delimiters)

    def _completes(self, token_ids: Sequence[int], texts: Sequence[str]) -> bool:
        if not texts or not self._can_complete(token_ids[-1]):
            return False
        tail = token_ids[-self.window :]
        with_it, without_it = self.decode(tail), self.decode(tail[:-1])
        return any(with_it.count(text) > without_it.count(text) for text in texts)

    def _can_complete(self, token_id: int) -> bool:
        """Whether a token's own text holds the last character of any text looked out for."""
        if not self._rules_out:
            return True
        known = self._may_complete.get(token_id)
        if known is None:
            text = self.decode([token_id])
            known = "\ufffd" in text or any(last in text for last in self._last_characters)
            self._may_complete[token_id] = known
        return known


def text_kept(before: str, after: str) -> int:
    """How many characters of a beam's text a step left as they were: all of them, unless the last
    one was incomplete or the step completed a stop string that began before."""
    shared = min(len(before), len(after))
    if after[:shared] != before[:shared]:
        shared = next(at for at in range(shared) if before[at] != after[at])
    return shared
