"""IndexFit: what of its own text a layer's index is fitted to, and when that is too little."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.device_tier.device_index import DeviceIndex
from penstock.engine.key_index import KeyIndex

SAMPLE_TOKENS = 2048
"""Keys of the prompt that a basis is made from when no adapter is at hand, all rows together."""


def sample_units(closed: int, sequences: int, group_tokens: int) -> NDArray[np.int64]:
    """Units of each row that a basis is made from: evenly apart, of [0, closed). [units]"""
    most = max(1, SAMPLE_TOKENS // sequences // group_tokens)
    return np.unique(np.linspace(0, closed - 1, min(closed, most)).astype(np.int64))


class IndexFit:
    """Remembers the prompt's newest queries for an index, and to how many tokens it was fitted.

    A basis of a short first turn, or of another text, ranks the tokens of this one badly. So an
    index is fitted anew once there is more than twice the text; while tokens are decoded only
    where all that there was fits the sample.

    Differences: the papers fit offline or to the prompt, and have one turn.
    """

    def __init__(self) -> None:
        self.queries: Tensor | None = None
        """[batch, num_heads, tokens, head_dim]"""
        self.tokens = 0
        """0 where the index was not fitted here."""

    def check(self, index: KeyIndex | DeviceIndex, length: int, *, decoding: bool) -> None:
        """Make the index forget what it was fitted to, where that is too little of `length`."""
        if decoding and not (index.refits and self.tokens < SAMPLE_TOKENS):
            return
        if 0 < 2 * self.tokens <= length:
            index.forget_fit()

    def keep(self, index: KeyIndex | DeviceIndex, query: Tensor) -> None:
        """Remember the newest queries of the prompt for an index that wants them."""
        count = index.wanted_queries
        if count:
            earlier = [] if self.queries is None else [self.queries]
            self.queries = torch.cat([*earlier, query], dim=2)[:, :, -count:].clone()

    def make(self, index: KeyIndex, query: Tensor | None, job: Callable[[], bool]) -> bool:
        """Let `job` make an index; one that fails halfway leaves none, and can be done again.

        Args:
            query: stands for the prompt's where none were kept. [batch, num_heads, head_dim]

        Returns:
            What `job` does: whether there was anything to index.
        """
        seen, made = self.queries, False
        if seen is None and index.num_prompt_queries and query is not None:
            self.queries = query[:, :, None]
        try:
            made = job()
        except BaseException:
            index.forget_fit()
            raise
        finally:
            if not made:
                self.queries = seen
        return made

    def hand_queries(self, index: KeyIndex | DeviceIndex) -> None:
        """Hand the index its queries, if there are any."""
        if self.queries is not None:
            index.see_queries(self.queries)
            self.queries = None

    def crop(self, length: int) -> None:
        """Tokens at and after `length` are gone."""
        if self.tokens:
            self.tokens = max(1, min(self.tokens, length))

    def take_rows_from(self, other: "IndexFit", rows: Tensor) -> None:
        """Become a copy with row i taken from row `rows[i]`."""
        self.tokens = other.tokens
        self.queries = None if other.queries is None else other.queries[rows]

    def reset(self) -> None:
        """Another text comes."""
        self.queries, self.tokens = None, 0
