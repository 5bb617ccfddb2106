"""Quality of every setting on a few documents, and of those that matter on more."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.methods.kvswap.policy import KVSwap
from penstock.tuner.candidates import Candidate
from research.tuning.held_out import HeldOutQuality, quality_key
from research.tuning.summary import TOP, keeps_all, keeps_memory

Row = dict[str, Any]


class TwoLooks:
    """Hundreds of settings are held to full attention on one or two documents, where a token missed
    says little; the fastest of them, and the picks, on a dozen."""

    def __init__(self, first: HeldOutQuality, closer: HeldOutQuality, floor: float) -> None:
        """
        Args:
            first: on a few documents.
            closer: on those and more, as many tokens of each.
            floor: most KL from full attention, in nats.
        """
        self._first, self._closer, self._floor = first, closer, floor

    def measure(self, policies: Sequence[KVSwap]) -> None:
        """On the first documents; what is known is not run again."""
        self._first.measure(policies)

    def of(self, fields: dict[str, Any]) -> Row:
        """KL, its 90th percentile and agreement of a measured setting, on more documents if it was;
        then "kl_first" is that of the first."""
        key = quality_key(fields)
        first, closer = self._first.found[key], self._closer.found.get(key)
        return dict(first) if closer is None else {**closer, "kl_first": first["kl"]}

    def look_closer(
        self, chosen: Sequence[Candidate], rows: Sequence[Row],
        is_pick: Callable[[Candidate], bool],
    ) -> None:  # fmt: skip
        """Measure picks, and the fastest until `TOP` keep quality, on more; the rows are changed.

        What diverged on the first documents is a part of the mean over all: a setting that used up
        there what all may have cannot pass, and is left as it is.

        Args:
            chosen: all with choices made.
            rows: of the same settings, with throughput, memory and quality. [chosen]
        """
        most_first = self._floor * self._closer.documents / self._first.documents
        pairs = list(zip(chosen, rows, strict=True))
        hopeful = [
            (candidate, row) for candidate, row in pairs
            if keeps_memory(row) and row["kl"] <= most_first
        ]  # fmt: skip
        hopeful.sort(key=lambda pair: -pair[1]["tokens_per_s"])
        kept = 0
        while hopeful and (wanted := TOP - kept):
            kept += self._close(hopeful[:wanted])
            hopeful = hopeful[wanted:]
        self._close([pair for pair in pairs if is_pick(pair[0]) and "kl_first" not in pair[1]])

    def _close(self, pairs: Sequence[tuple[Candidate, Row]]) -> int:
        """Measure settings on more documents; how many keep quality there, and memory."""
        self._closer.measure([candidate.policy for candidate, _ in pairs])
        for _, row in pairs:
            row |= self.of(row["fields"])
        return sum(keeps_all(row, self._floor) for _, row in pairs)

    def summaries(self) -> dict[str, Row]:
        """What was measured on what, for a result."""
        return {
            "quality": self._first.summary(self._floor),
            "closer_quality": self._closer.summary(self._floor),
        }
