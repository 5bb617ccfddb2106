"""What becomes of a request, in the order in which it happens."""

from dataclasses import dataclass
from typing import TypeAlias

from penstock.generation.logprobs import LogprobsOnePosition
from penstock.generation.output import CompletionOutput, FinishReason, RunReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """The request waits until its cache fits; the first event of each, made by `submit`."""

    position: int
    """Requests in front of it that wait too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """A part of the prompt was read; once before the first part too."""

    processed: int
    """Tokens of the prompt that are in, those of a stored text included."""
    cached: int
    """Of them, tokens whose KV was stored before."""
    total: int
    """Tokens of the prompt, those of a stored text included."""
    time_s: float
    """Since the request was admitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """An answer has grown by a token."""

    index: int
    """Of the answer, among the request's `n`."""
    token_ids: list[int]
    text: str
    """What the token releases; empty while it may be part of a character or a stop string."""
    logprobs: list[LogprobsOnePosition] | None
    """By token; None if none were asked for."""
    finish_reason: FinishReason | None
    """Set with the last token of this answer."""
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    """Those of a stored text included."""
    cached_tokens: int
    """Of them, tokens that were not read, because their KV was stored before."""
    new_tokens: int
    """Of all answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Times of a request, in seconds. What others did in between is in them."""

    queue_s: float
    """From `submit` to admission."""
    prefill_s: float
    """From admission to the first token; to the end, where there was none."""
    decode_s: float
    """From the first token to the last."""
    total_s: float
    """From `submit` to the end."""

    @property
    def first_token_s(self) -> float:
        """From `submit` to the first token."""
        return self.queue_s + self.prefill_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """All answers are over, or the request was cancelled; the last event."""

    outputs: list[CompletionOutput]
    """The `n` answers, whole; those that a cancelled request had not ended are "abort"."""
    prompt_logprobs: list[LogprobsOnePosition | None] | None = None
    """By token of the prompt, the first is None; None if none were asked for."""
    usage: Usage
    timings: Timings
    attended: list[float] | None = None
    """By part of the text: the share of its tokens that a step saw, the mean; see
    `Request.attended_parts`. None: it was not asked for, or nothing was selected."""
    run: RunReport | None
    """Memory, bytes read and written, stall and hits (`run.stats`), notices; None for a request
    that was cancelled before it had a cache."""

    @property
    def reason(self) -> FinishReason:
        """Why the first answer is over."""
        return self.outputs[0].finish_reason or "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The request cannot go on; the last event. Others are not concerned."""

    error: BaseException


Event: TypeAlias = Queued | Prefill | Token | Finished | Failed
