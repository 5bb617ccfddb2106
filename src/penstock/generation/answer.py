"""Answer: one answer in the making, from choices of tokens to what is returned of it."""

from dataclasses import dataclass

from penstock.generation.answer_text import AnswerText
from penstock.generation.logprobs import LogprobsOnePosition, position_of
from penstock.generation.output import CompletionOutput, FinishReason
from penstock.generation.sampler import Choice, SamplingRow
from penstock.models.loader import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class EndTokens:
    """Tokens that end an answer by the model or its tokenizer."""

    primary: int | None = None
    """The tokenizer's; ends an answer without a `stop_reason`."""
    others: frozenset[int] = frozenset()
    """Further ones of the model's generation config; each is a `stop_reason`."""

    @property
    def all(self) -> frozenset[int]:
        """Every one of them."""
        return self.others if self.primary is None else self.others | {self.primary}


class Answer:
    """Takes the tokens of one answer until it ends: an end token, a stop string, or its length."""

    def __init__(
        self, row: SamplingRow, tokenizer: Tokenizer | None, *, max_tokens: int, ends: EndTokens
    ) -> None:
        """Begin an answer.

        Args:
            row: gets the tokens, and knows the settings.
            max_tokens: most new tokens, the room of the model regarded.
        """
        params = row.params
        self.row = row
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        stops = frozenset(int(token) for token in params.stop_token_ids or ())
        self._end_token = None if params.ignore_eos else ends.primary
        self._stop_tokens = stops if params.ignore_eos else stops | ends.others
        row.end_token_ids = stops | ends.all
        self._text = AnswerText(tokenizer, params)
        self._logprobs: list[LogprobsOnePosition] | None = None if params.logprobs is None else []
        self.score = 0.0
        """Sum of the logarithms of probabilities, where they are computed."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Every token so far."""
        return self.row.output_token_ids

    @property
    def text(self) -> str:
        """Everything released so far."""
        return self._text.text

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self._max_tokens - len(self.token_ids)

    def is_end(self, token: int) -> bool:
        """Whether a token would end it, were it long enough."""
        return token == self._end_token or token in self._stop_tokens

    def take(self, choice: Choice) -> str:
        """Add a token; returns the text that it releases."""
        token, ids = choice.token_id, self.row.output_token_ids
        if choice.tokens is not None:
            self.score += choice.tokens.logprob
            if self._logprobs is not None:
                self._logprobs.append(position_of(choice.tokens, ids, self._tokenizer))
        ids.append(token)
        if len(ids) >= self.row.params.min_tokens and self._ends(token):
            piece = self._text.push(token) if self.row.params.include_stop_str_in_output else ""
            return piece + self._text.finish()
        piece = self._text.push(token)
        if self._text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        elif len(ids) >= self._max_tokens:
            piece += self.end()
        return piece

    def end(self, reason: FinishReason = "length") -> str:
        """Something else ends it, unless it is over; returns the text that was held back."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        return self._text.finish()

    def output(self, index: int) -> CompletionOutput:
        """All of it, as it is now."""
        return self._made(index, self.text, 0)

    def news(self, index: int, piece: str) -> CompletionOutput:
        """What its newest token has added."""
        return self._made(index, piece, len(self.token_ids) - 1)

    def _made(self, index: int, text: str, begin: int) -> CompletionOutput:
        logprobs, params = self._logprobs, self.row.params
        is_scored = logprobs is not None or params.num_answers > params.n
        return CompletionOutput(
            index=index, text=text, token_ids=self.token_ids[begin:],
            cumulative_logprob=self.score if is_scored else None,
            logprobs=None if logprobs is None else logprobs[begin:],
            finish_reason=self.finish_reason, stop_reason=self.stop_reason,
        )  # fmt: skip

    def _ends(self, token: int) -> bool:
        """Whether a token ends it; remembers why."""
        if not self.is_end(token):
            return False
        self.finish_reason = "stop"
        self.stop_reason = None if token == self._end_token else token
        return True
