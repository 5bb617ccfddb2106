"""What a call to `LLM.generate` hands back: answers by prompt, one report per run."""

from dataclasses import dataclass
from typing import Literal

from penstock.core.ledger import MemoryReport
from penstock.core.stats import RunStats
from penstock.generation.logprobs import LogprobsOnePosition
from penstock.generation.verified_counts import Verified

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Time, traffic and memory of one batch. Times are wall-clock seconds."""

    policy: str
    """Name of the policy."""
    exact: bool
    """Whether decode streamed the whole past instead of a selection."""
    prompt_tokens: int
    """Tokens of all prompts, padding left out."""
    new_tokens: int
    """Tokens of all answers."""
    prefill_s: float
    """From the start of the first chunk to the first new token."""
    decode_s: float
    """From the first new token to the last."""
    decode_tokens: int
    """New tokens behind the first of each answer: those that `decode_s` went into."""
    stats: RunStats
    memory: MemoryReport
    store: str
    """Where the KV cache lay, in words."""
    simulated: str | None
    """Name of the device whose times were simulated, or None for a real one."""
    notices: tuple[str, ...]
    """What a user should know about this run."""
    restored_tokens: int = 0
    """Prompt tokens whose KV was stored before and taken as it was."""
    recomputed_tokens: int = 0
    """Prompt tokens that were stored too, damaged since, and prefilled again."""
    verified: Verified | None = None
    """What drafts have brought; None where every token was decoded by itself."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second; those that were restored are left out."""
        read = self.prompt_tokens - self.restored_tokens - self.recomputed_tokens
        return read / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens per second, all sequences together."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One answer to a prompt, or what is new of it."""

    index: int
    """Among the answers to the prompt."""
    text: str
    token_ids: list[int]
    """New tokens, the token that ended the answer included."""
    cumulative_logprob: float | None = None
    """Sum of the logarithms of the tokens' probabilities; None without `logprobs` or `best_of`."""
    logprobs: list[LogprobsOnePosition] | None = None
    """By token of `token_ids`; None if none were asked for."""
    finish_reason: FinishReason | None = None
    """ "stop": an end token or a stop string; "length": `max_tokens` was reached, or the room that
    the model has; "abort": the caller has stopped it; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the end-of-sequence token."""

    def finished(self) -> bool:
        """Whether the answer is over."""
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class Answers:
    """A prompt and answers to it. Shortcuts are those of the first answer."""

    request_id: str
    """Counts up over the calls of an `LLM`."""
    prompt: str | None
    """The prompt's text, or None when it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOnePosition | None] | None = None
    """By token of the prompt, the first is None; None if none were asked for."""
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)


@dataclass(kw_only=True, slots=True)
class StreamedOutput(Answers):
    """What is new of one answer, as `LLM.stream` yields it: `outputs` has one item."""

    prompt_index: int
    """Number of the prompt in the call."""
    finished: bool
    """Whether all answers to the prompt are over."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is over; None while it goes on."""
        return self.outputs[0].finish_reason


@dataclass(kw_only=True, slots=True)
class RequestOutput(Answers):
    """The answers to one prompt."""

    run: RunReport
    """Of the whole batch, shared by its prompts."""
    finished: bool = True

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer is over: "stop", "length" or "abort"."""
        return self.outputs[0].finish_reason or "length"

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not read, because their KV was stored before."""
        return self.run.restored_tokens

    @property
    def stats(self) -> RunStats:
        """Counters of the run."""
        return self.run.stats

    @property
    def memory(self) -> MemoryReport:
        """What the cache held in fast memory, item by item."""
        return self.run.memory
