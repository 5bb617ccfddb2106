"""Verified: what drafts of a run have brought, and what they cost beside exact decoding."""

from dataclasses import asdict, dataclass

from penstock.core.stats import RunStats


@dataclass(kw_only=True, slots=True)
class Verified:
    """Counters of one run. Places count once, however many rows there are."""

    rows: int = 1
    """Answers that were made together."""
    passes: int = 0
    """Exact passes."""
    drafted: int = 0
    """Places drafted under the policy."""
    accepted: int = 0
    """Of those, the ones at which the exact pass chose the same in every row."""
    tokens: int = 0
    """New tokens that passes brought, all rows together."""
    draft_s: float = 0.0
    pass_s: float = 0.0
    """Seconds of all passes; one takes at least as long as a token in exact mode."""
    draft_bytes: int = 0
    pass_bytes: int = 0
    """Bytes that passes read; one reads as many as a token of every row in exact mode."""

    def count(self, before: RunStats, after: RunStats) -> None:
        """Take time and bytes from what the cache counted; both are copies."""
        self.draft_s += after.decode.seconds - before.decode.seconds
        self.pass_s += after.verify.seconds - before.verify.seconds
        self.draft_bytes += after.decode.read_bytes - before.decode.read_bytes
        self.pass_bytes += after.verify.read_bytes - before.verify.read_bytes

    @property
    def tokens_per_pass(self) -> float:
        """Places that a pass brings: those accepted, and the one behind them."""
        return 1 + self.accepted / self.passes if self.passes else 0.0

    @property
    def accepted_share(self) -> float:
        """Accepted places of those drafted; 0 where none were."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Drafts and passes, by new token."""
        return (self.draft_s + self.pass_s) / self.tokens if self.tokens else 0.0

    @property
    def seconds_per_pass(self) -> float:
        """Of an exact pass over a draft."""
        return self.pass_s / self.passes if self.passes else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for drafts and passes, by new token."""
        return (self.draft_bytes + self.pass_bytes) / self.tokens if self.tokens else 0.0

    @property
    def exact_bytes_per_token(self) -> float:
        """Bytes that exact mode would have read for a new token, while as many rows go on."""
        return self.pass_bytes / (self.passes * self.rows) if self.passes else 0.0

    def as_dict(self) -> dict[str, float]:
        """Counters and what follows from them, by name."""
        derived = (
            "tokens_per_pass", "accepted_share", "seconds_per_token", "seconds_per_pass",
            "bytes_per_token", "exact_bytes_per_token",
        )  # fmt: skip
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
