"""StreamingLLM: attention sinks and the most recent tokens. Source: arXiv 2309.17453."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy
from penstock.engine.retrieval_policy import IndexSize
from penstock.methods.baselines.forgetting import ForgettingPolicy


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(ForgettingPolicy):
    """The first tokens and the newest ones; nothing is ranked.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2: four sinks and a rolling cache.

    Differences: the rolling cache is the window and the `selected_tokens` before it; tokens keep
    the positions that they have in the text (the original counts positions within its cache, so
    that texts may be longer than the model's positions); the prompt is attended to in full (the
    original may roll through it); dropped tokens stay in the store, unread.
    """

    name: ClassVar[str] = "streaming_llm"

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple[SelectionPolicy, IndexSize]]:
        """Positions alone, and their scores."""
        return [(self, IndexSize(0, 8 * request.max_tokens))]

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return RecencyIndex(selected_units=request.selected_units)


class RecencyIndex(KeyIndex):
    """Ranks tokens by position; what has once been too old stays so. Holds no memory."""

    def __init__(self, *, selected_units: int) -> None:
        """Know how many are kept.

        Args:
            selected_units: tokens of a selection.
        """
        self._selected_units = selected_units
        self._oldest = 0
        """Tokens before it have been forgotten, in every row."""

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        """Tokens taken in anew live."""
        self._oldest = min(self._oldest, first_token)

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """The position, minus infinity for what has been forgotten."""
        self._oldest = max(self._oldest, num_units - self._selected_units)
        positions = torch.arange(num_units, device=query.device, dtype=torch.float32)
        positions[: self._oldest] = float("-inf")
        return positions.expand(query.shape[0], -1).contiguous()

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, RecencyIndex)
        self._oldest = other._oldest
