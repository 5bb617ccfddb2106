"""RunStats: bytes, reads, hits and stall time of prefill, decode steps and verification."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields


@dataclass(kw_only=True, slots=True)
class PhaseStats:
    """Counters of one phase of one cache; times in seconds."""

    steps: int = 0
    """Forward passes: chunks in prefill, tokens in decode."""
    tokens: int = 0
    """Tokens that went through, batch rows counted."""
    seconds: float = 0.0
    """Time from the first layer's entry to the last layer's exit, summed over steps."""
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    units_wanted: int = 0
    """Units that selections asked for."""
    units_hit: int = 0
    """Of those, already resident."""
    units_reused: int = 0
    """Units attended to as an earlier step had selected and fetched them, nothing being asked;
    neither wanted nor hit."""
    stall_s: float = 0.0
    """Time that attention waited for reads."""
    predict_s: float = 0.0
    """Time in query prediction, scoring and selection."""
    index_s: float = 0.0
    """Time in which indexes were made from a whole prompt (clusters, codes)."""
    counters: dict[str, float] = field(default_factory=dict)
    """What the method counts beside, by name; see `SelectionPolicy.counters`."""

    def count(self, name: str, amount: float) -> None:
        """Add to a counter of the method."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def as_dict(self) -> dict[str, float]:
        """Every counter by its name, the method's beside the engine's."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["counters"]
        return own | self.counters

    @property
    def hit_rate(self) -> float:
        """Share of wanted units that were resident; 0 when nothing was wanted."""
        return self.units_hit / self.units_wanted if self.units_wanted else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the phase's time spent waiting for reads."""
        return self.stall_s / self.seconds if self.seconds else 0.0

    @property
    def read_bytes_per_token(self) -> float:
        """Bytes read for each token that went through."""
        return self.read_bytes / self.tokens if self.tokens else 0.0


@dataclass(kw_only=True, slots=True)
class RunStats:
    """All phases of one cache's life."""

    prefill: PhaseStats = field(default_factory=PhaseStats)
    decode: PhaseStats = field(default_factory=PhaseStats)
    """Where tokens are verified: of the drafts."""
    verify: PhaseStats = field(default_factory=PhaseStats)
    """Exact passes over drafted tokens; none where tokens are not verified."""
    again_tokens: int = 0
    """Tokens that were kept in mind and had to be prefilled again: recurrent layers could not go
    back to where they were wanted, and went to a checkpoint in front of it. Batch rows counted."""

    def begin(self, counters: Iterable[str]) -> None:
        """Count from 0; counters: the method's own."""
        self.prefill, self.decode, self.verify = PhaseStats(), PhaseStats(), PhaseStats()
        self.again_tokens = 0
        for name in counters:
            self.prefill.count(name, 0)
            self.decode.count(name, 0)
