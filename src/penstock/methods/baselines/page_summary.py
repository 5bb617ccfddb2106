"""PageSummaryIndex: what indexes that hold two vectors for each page of keys share."""

from abc import abstractmethod

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex
from penstock.kernels.shrunk_query import shrunk


class PageSummaryIndex(KeyIndex):
    """Two vectors of head_dim for each page and KV head, from which a page's score is estimated."""

    def __init__(
        self, shape: KVShape, *, batch: int, max_groups: int, group_tokens: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the summaries of `max_groups` pages.

        Args:
            shape: of a row; one KV head in it for selection per head.
        """
        self._shape = shape
        self._group_tokens = group_tokens
        size = (2, batch, max_groups, shape.num_kv_heads, shape.head_dim)
        self._summaries = torch.zeros(size, dtype=shape.dtype, device=device)

    @staticmethod
    def num_bytes(shape: KVShape, *, batch: int, max_groups: int) -> int:
        """Bytes of one layer's summaries, for the ledger."""
        return 2 * batch * max_groups * shape.joint_dim * shape.dtype.itemsize

    @staticmethod
    def scratch_bytes(shape: KVShape, *, batch: int, max_groups: int) -> int:
        """Temporaries of one call of `score`: products per query head, twice."""
        return 8 * batch * max_groups * shape.num_query_heads

    @staticmethod
    @abstractmethod
    def summarise(pages: Tensor) -> tuple[Tensor, Tensor]:
        """The two vectors of each page.

        Args:
            pages: [batch, pages, group_tokens, kv_heads, head_dim]

        Returns:
            [batch, pages, kv_heads, head_dim] each.
        """

    @staticmethod
    @abstractmethod
    def estimate(first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
        """The most that a page's keys could give with each query.

        Args:
            first, second: of the pages. [batch, kv_heads, pages, head_dim]
            queries: [batch, kv_heads, head_dim, query heads of a KV head]

        Returns:
            [batch, kv_heads, pages, query heads of a KV head]
        """

    def append(self, keys: Tensor, first_token: int) -> None:
        """See `KeyIndex.append`."""
        pages = keys.reshape(keys.shape[0], -1, self._group_tokens, *keys.shape[2:])
        first = first_token // self._group_tokens
        end = first + pages.shape[1]
        for held, part in zip(self._summaries, self.summarise(pages), strict=True):
            held[:, first:end] = part

    def put(self, keys: Tensor, unit: Tensor) -> None:
        """See `KeyIndex.put`."""
        for held, part in zip(self._summaries, self.summarise(keys.unsqueeze(1)), strict=True):
            held.index_copy_(1, unit, part.to(held.dtype))

    def score(self, query: Tensor, num_units: int) -> Tensor:
        """See `KeyIndex.score`; query heads of all KV heads of the row are added."""
        shape = self._shape
        query, factor = shrunk(query)
        grouped = query.view(query.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        first, second = self._summaries[:, :, :num_units].transpose(2, 3)
        scores = self.estimate(first, second, grouped.transpose(2, 3)).float().sum(dim=(1, 3))
        return scores if factor == 1.0 else scores.mul_(factor)

    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """See `KeyIndex.take_rows_from`."""
        assert isinstance(other, type(self))
        for held, source in zip(self._summaries, other._summaries, strict=True):
            held.copy_(source[rows])
