"""KeyIndex: a compact in-memory summary of one layer's keys that ranks units for a query."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.selection import Selection
from penstock.kernels.group_selection import GroupSelection


class KeyIndex(ABC):
    """Summary of one layer's keys. Owns all mutable state of a policy for that layer."""

    @abstractmethod
    def append(self, keys: Tensor, first_token: int) -> None:
        """Take in the keys of units that have closed.

        Args:
            keys: post-RoPE keys of whole units. [batch, tokens, kv_heads, head_dim]
            first_token: cache position of the first of them.
        """

    def put(self, keys: Tensor, unit: Tensor) -> None:
        """Take in one unit whose number only the device knows, whole or as far as it goes.

        Only indexes of the device tier's policies can do that.

        Args:
            keys: post-RoPE. [batch, group_tokens, kv_heads, head_dim]
            unit: int64 [1]
        """
        raise AssertionError(f"{type(self).__name__} is no index for the device tier")

    def begin_step(  # noqa: B027 - optional
        self, query: Tensor, first_unit: NDArray[np.int64], position: int
    ) -> None:
        """Learn of a decode step, also of one that has nothing to select; most indexes do not.

        Args:
            query: as for `score`. [batch, num_heads, head_dim]
            first_unit: first unit that may be selected, per row. [batch]
            position: cache position of the step's token.
        """

    @abstractmethod
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """Rank the first `num_units` units; larger is more important.

        Args:
            query: post-RoPE query, true or predicted. [batch, num_heads, head_dim]

        Returns:
            float [batch, num_units]
        """

    def best_units(
        self, query: Tensor, first: int, num_units: int, wanted: int
    ) -> NDArray[np.int64] | None:
        """The units of [first, num_units) with the highest scores, where that is cheaper than all
        scores.

        Args:
            query: as for `score`.
            wanted: at least 1; all are taken where there are fewer.

        Returns:
            Ascending in each row, [batch, min(wanted, num_units - first)]; or None: `score` them.
        """
        return None

    def selection(self) -> GroupSelection | None:
        """What `best_units` is one call of, for callers that do more than that in one; None where
        it is something else."""
        return None

    def score_before(self, query: Tensor, num_units: int, end: Tensor, first: Tensor) -> Tensor:
        """As `score`, where only the device knows which units there are.

        Args:
            first: units before it are padding, and mean nothing either. int [batch]
            end: units from here on mean nothing, and what their scores are does not matter.
                int64 [1]
        """
        return self.score(query, num_units)

    observes: ClassVar[bool] = False
    """Whether `observe` is called; it costs one more product with the pool's keys."""

    def observe(self, selection: Selection, weights: Tensor) -> None:  # noqa: B027 - optional
        """Learn from the attention that a selection received; most indexes do not.

        Args:
            weights: share of the softmax, added over the row's query heads. [batch, wanted]
        """

    lse: Tensor | None = None
    """Receives, step by step, the log-sum-exp of all that was attended to; None: it is not wanted.
    float32 [batch, num_heads]"""

    def rebuild_keys(self, rows: NDArray[np.int64], units: NDArray[np.int64]) -> Tensor | None:
        """Keys to attend to in place of the stored ones, for units that have just landed.

        Args:
            rows, units: of the units. [landed]

        Returns:
            [landed, group_tokens, kv_heads, head_dim], or None for the stored ones.
        """
        return None

    @abstractmethod
    def take_rows_from(self, other: "KeyIndex", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""

    @property
    def ready(self) -> bool:
        """Whether `score` can be called; otherwise `fit` must come first."""
        return True

    num_prompt_queries: ClassVar[int] = 0
    """Newest queries of the prompt that `see_queries` wants."""

    @property
    def wanted_queries(self) -> int:
        """As `num_prompt_queries`, of the prompt that comes next."""
        return self.num_prompt_queries

    looks_first: ClassVar[bool] = False
    """Whether all keys of the prompt pass through `look` before they are appended."""

    def see_queries(self, queries: Tensor) -> None:  # noqa: B027 - optional
        """Take the prompt's newest queries, before `fit`; the first decode query where none were
        seen (KV that was put in without a forward pass).

        Args:
            queries: post-RoPE. [batch, num_heads, at most num_prompt_queries, head_dim]
        """

    def see_start(self, first_unit: NDArray[np.int64]) -> None:  # noqa: B027 - optional
        """Learn where each row begins, before a prompt's keys: units before it are padding.
        [batch]"""

    def fit(self, sample: Tensor, positions: Tensor) -> None:  # noqa: B027 - optional
        """Learn what the index needs from a sample of the prompt's own keys.

        Args:
            sample: the keys themselves are appended afterwards. [batch, tokens, kv_heads, head_dim]
            positions: cache positions of the sample's tokens. int64 [tokens]
        """

    refits: ClassVar[bool] = False
    """Whether a `fit` to few tokens is made again while tokens are decoded, after `forget_fit`."""

    def forget_fit(self) -> None:  # noqa: B027 - optional
        """What `fit` learnt is of another text, or of too little: not `ready` any more, where `fit`
        is what made it so. Indexes that notice a new prompt by themselves do nothing."""

    def state(self, num_units: int) -> dict[str, Tensor] | None:
        """What `load_state` needs to go on with the first `num_units` units, one row's.

        Returns:
            Tensors by name; None for indexes that are made from the keys again.
        """
        return None

    def load_state(self, state: Mapping[str, Tensor], num_units: int) -> None:
        """Become, in every row, what `state` was taken from; `ready` from then on.

        Args:
            state: may come from a file; nothing of it is believed.
            num_units: that it must have.

        Raises:
            ConfigError: the state is another index's (other settings), is of fewer units, or holds
                what no index writes. Nothing is changed then.
        """
        raise AssertionError(f"{type(self).__name__} keeps no state")

    @property
    def unwrapped(self) -> "KeyIndex":
        """The method's own index, where another one is laid over it (benchmarks)."""
        return self

    def fitted(self, end_token: int) -> None:  # noqa: B027 - optional
        """Learn that all tokens before `end_token` were taken in by `unwrapped`, not by
        `append`."""

    def close(self) -> None:  # noqa: B027 - optional
        """Let whatever works beside the decode loop come to its end."""

    def look(self, keys: Tensor, first_token: int) -> None:  # noqa: B027 - optional
        """See the prompt's keys once, before any is appended; arguments as in `append`."""
