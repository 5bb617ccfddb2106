"""What a call to `LLM.generate` hands back: one answer per prompt, one report per run."""

from dataclasses import dataclass
from typing import Literal

from penstock.core.ledger import MemoryReport
from penstock.core.stats import RunStats

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

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second; those that were restored are left out."""
        read = self.prompt_tokens - self.restored_tokens - self.recomputed_tokens
        return read / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens per second, all sequences together."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The answer to one prompt."""

    prompt: str | None
    """The prompt's text, or None when it was given as token ids."""
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    """New tokens, the end-of-sequence token included when there was one."""
    finish_reason: FinishReason
    """ "stop": end-of-sequence token or a stop string; "length": `max_tokens` was reached;
    "abort": the caller has stopped it."""
    run: RunReport
    """Of the whole batch, shared by its answers."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def stats(self) -> RunStats:
        """Counters of the run."""
        return self.run.stats

    @property
    def memory(self) -> MemoryReport:
        """What the cache held in fast memory, item by item."""
        return self.run.memory
