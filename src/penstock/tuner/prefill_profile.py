"""PrefillProfile: time to first token by length, from the chunks of one measured prompt."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.tuner.block_profile import fit_terms


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Seconds of a prompt: `linear` for each token, `quadratic` for each pair of tokens."""

    linear: float
    quadratic: float

    def seconds(self, batch: int, tokens: int) -> float:
        """All prompts through the model."""
        return batch * (self.linear * tokens + self.quadratic * tokens**2)

    def first_token_s(
        self, batch: int, tokens: int, *, written_bytes: int, write_bandwidth: float
    ) -> float:
        """To the first token: writing goes on behind the model, the slower one counts."""
        return max(self.seconds(batch, tokens), written_bytes / write_bandwidth)


class PrefillWatch:
    """Call it with the tokens done after every chunk of one prompt; then ask for the profile."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        """
        Args:
            then: is called too.
        """
        self._then = then
        self._start = time.perf_counter()
        self._seen: list[tuple[int, float]] = []

    def __call__(self, tokens: int) -> None:
        """Note the time."""
        self._seen.append((tokens, time.perf_counter() - self._start))
        if self._then is not None:
            self._then(tokens)

    def profile(self, most_tokens: int | None = None) -> PrefillProfile:
        """The curve through what was seen; at least one chunk.

        Args:
            most_tokens: where the prompt ended, if others followed.
        """
        seen = [each for each in self._seen if most_tokens is None or each[0] <= most_tokens]
        rows = [[tokens, tokens**2 / 2**13] for tokens, _ in seen]
        linear, quadratic = fit_terms(rows, [max(seconds, 1e-9) for _, seconds in seen])
        return PrefillProfile(float(linear), float(quadratic) / 2**13)
