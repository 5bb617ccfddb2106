"""KeyIndex: a compact in-memory summary of one layer's keys that ranks units for a query."""

from abc import ABC, abstractmethod

from torch import Tensor

from penstock.core.selection import Selection


class KeyIndex(ABC):
    """Summary of one layer's keys. Owns all mutable state of a policy for that layer."""

    @abstractmethod
    def append(self, keys: Tensor, first_token: int) -> None:
        """Take in the keys of units that have closed.

        Args:
            keys: post-RoPE keys of whole units. [batch, tokens, kv_heads, head_dim]
            first_token: cache position of the first of them.
        """

    @abstractmethod
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """Rank the first `num_units` units; larger is more important.

        Args:
            query: post-RoPE query, true or predicted. [batch, num_heads, head_dim]

        Returns:
            float [batch, num_units]
        """

    def observe(self, selection: Selection, weights: Tensor) -> None:  # noqa: B027 - optional
        """Learn from the attention that a selection received; most indexes do not."""

    @abstractmethod
    def take_rows_from(self, other: "KeyIndex", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""

    @property
    def ready(self) -> bool:
        """Whether `score` can be called; otherwise `fit` must come first."""
        return True

    def fit(self, sample: Tensor) -> None:  # noqa: B027 - optional
        """Learn what the index needs from a sample of the prompt's own keys.

        Args:
            sample: [tokens, kv_heads, head_dim]; the keys themselves are appended afterwards.
        """
