"""EngineStats: what an engine does now, and what it has done since it began."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """A copy, as of one moment between two steps."""

    running: int = 0
    """Requests that have a cache: their prompts are read, or their answers made."""
    prefilling: int = 0
    """Of them, those whose prompts are read."""
    waiting: int = 0
    used_bytes: int = 0
    """Fast memory that is promised to the caches of running requests."""
    limit_bytes: int | None = None
    """Most of it; None: there is no limit but that of each cache."""
    peak_bytes: int = 0
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Requests that are over, by the reason of their first answer; "error" for those that
    failed."""
    refused: int = 0
    """Requests that found the queue full."""
    prompt_tokens: int = 0
    """Of requests that have had their first token; stored texts included."""
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    """Forward passes in which tokens were decoded."""
    step_rows: int = 0
    """Rows of all of them: `step_rows / steps` is the mean batch."""
    joint_steps: int = 0
    """Of the steps, those in which several requests shared a forward pass."""
    chunks: int = 0
    """Forward passes in which prompts were read."""
    read_bytes: int = 0
    """From stores, of requests that are over; so are those below."""
    written_bytes: int = 0
    stall_s: float = 0.0
    units_wanted: int = 0
    units_hit: int = 0
