"""ScoredPolicy: a method that is a summary of each unit's keys, and scores of the summaries."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, AheadPolicy, IndexSize
from penstock.kernels.scaled_query import scaled_down


@dataclass(frozen=True, kw_only=True)
class ScoredPolicy(AheadPolicy):
    """A plain method: what it keeps of a unit's keys, and how it scores that for a query.

    A subclass has a `name` and the three methods below. The rest has a default: index, sizing,
    plan, the device tier, rows that change places, crops, and choosing a layer ahead.

    A unit's summary follows from its keys alone. A method that learns from the prompt, or from what
    was attended to, makes a `KeyIndex` of its own.
    """

    device_tier: ClassVar[bool] = True
    """False for methods whose `summarise` or `score` waits for the device, as `item()` does."""
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("group_tokens", (8, 16, 32, 64), "tokens of a unit"),
        SELECTED,
    )

    group_tokens: int = 16
    """Tokens of a unit."""

    @abstractmethod
    def summary_bytes(self, shape: KVShape) -> int:
        """Bytes of one unit's summary, all tensors and KV heads together.

        Args:
            shape: of a row; one KV head in it where the method selects per head.
        """

    @abstractmethod
    def summarise(self, keys: Tensor) -> tuple[Tensor, ...]:
        """What is kept of units.

        Args:
            keys: post-RoPE. [rows, kv_heads, units, group_tokens, head_dim]

        Returns:
            Tensors of any dtype, as many and as large for every unit. [rows, kv_heads, units, ...]
        """

    @abstractmethod
    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        """Rank units for each query head; larger is more important. Heads of a row are added.

        Args:
            summary: what `summarise` gave. [rows, kv_heads, units, ...]
            query: post-RoPE, true or predicted; a column for each query head of a KV head. Of
                float16 it is a fraction of the query, so that products stay numbers.
                [rows, kv_heads, head_dim, heads]

        Returns:
            [rows, kv_heads, units, heads]
        """

    def scratch_bytes(self, shape: KVShape) -> int:
        """Bytes of temporaries that `score` needs for one unit: two products of each query head.

        Args:
            shape: of a row.
        """
        return 8 * shape.num_query_heads

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple[SelectionPolicy, IndexSize]]:
        units = request.batch * ceil_div(request.max_tokens, self.group_tokens)
        summary, scratch = self.summary_bytes(request.shape), self.scratch_bytes(request.shape)
        return [(self, IndexSize(units * summary, units * scratch))]

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return ScoredIndex(self, request)


class ScoredIndex(KeyIndex):
    """The summaries of one layer's units."""

    def __init__(self, policy: ScoredPolicy, request: IndexRequest) -> None:
        """Allocate the summaries of all units, each like that of a unit of zeros."""
        shape, self._policy = request.shape, policy
        self._kv_heads, self._group_tokens = shape.num_kv_heads, request.group_tokens
        size = (1, shape.num_kv_heads, 1, request.group_tokens, shape.head_dim)
        like = policy.summarise(torch.zeros(size, dtype=shape.dtype, device=request.device))
        taken, priced = sum(part.nbytes for part in like), policy.summary_bytes(shape)
        assert taken == priced, f"{policy.name}: a summary takes {taken} bytes, not {priced}"
        self.summary = tuple(
            part.new_zeros(request.batch, part.shape[1], request.max_units, *part.shape[3:])
            for part in like
        )

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        units = keys.reshape(len(keys), -1, self._group_tokens, *keys.shape[2:])
        units = units.permute(0, 3, 1, 2, 4)
        first = first_token // self._group_tokens
        end = first + units.shape[2]
        for kept, part in zip(self.summary, self._policy.summarise(units), strict=True):
            kept[:, :, first:end] = part

    @override
    def put(self, keys: Tensor, unit: Tensor) -> None:
        units = keys.transpose(1, 2).unsqueeze(2)
        for kept, part in zip(self.summary, self._policy.summarise(units), strict=True):
            kept.index_copy_(2, unit, part)

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        query, factor = scaled_down(query)
        by_head = query.view(len(query), self._kv_heads, -1, query.shape[2])
        summary = tuple(part[:, :, :num_units] for part in self.summary)
        scores = self._policy.score(summary, by_head.transpose(2, 3)).float().sum(dim=(1, 3))
        return scores if factor == 1.0 else scores.mul_(factor)

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, ScoredIndex)
        for kept, source in zip(self.summary, other.summary, strict=True):
            kept.copy_(source[rows])
