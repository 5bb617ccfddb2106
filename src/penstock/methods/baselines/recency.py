"""RecencyIndex: ranks tokens by position (StreamingLLM, section 3.2)."""

import torch
from torch import Tensor
from typing_extensions import override

from penstock.engine.key_index import KeyIndex


class RecencyIndex(KeyIndex):
    """Ranks tokens by position; what has once been too old stays so. Holds no memory.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2.
    """

    def __init__(self, *, selected_groups: int) -> None:
        """Know how many are kept.

        Args:
            selected_groups: tokens of a selection.
        """
        self._selected_groups = selected_groups
        self._oldest = 0
        """Tokens before it have been forgotten, in every row."""

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        """Tokens taken in anew live."""
        self._oldest = min(self._oldest, first_token)

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """The position, minus infinity for what has been forgotten."""
        self._oldest = max(self._oldest, num_units - self._selected_groups)
        positions = torch.arange(num_units, device=query.device, dtype=torch.float32)
        positions[: self._oldest] = float("-inf")
        return positions.expand(query.shape[0], -1).contiguous()

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, RecencyIndex)
        self._oldest = other._oldest
