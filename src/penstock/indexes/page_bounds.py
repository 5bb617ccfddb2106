"""PageBoundsIndex: smallest and largest key components of each page (Quest, section 3)."""

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.indexes.base import KeyIndex


class PageBoundsIndex(KeyIndex):
    """Scores a page by the largest product that any key within its bounds could have.

    Source: Quest (arXiv 2406.10774), section 3.2: sum over components of
    max(q_i * min_i, q_i * max_i), which is relu(q) . max - relu(-q) . min.
    """

    def __init__(
        self, shape: KVShape, *, batch: int, max_groups: int, group_tokens: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the bounds of `max_groups` pages.

        Args:
            shape: of a row; one KV head in it for selection per head.
        """
        self._shape = shape
        self._group_tokens = group_tokens
        size = (2, batch, max_groups, shape.num_kv_heads, shape.head_dim)
        self._bounds = torch.zeros(size, dtype=shape.dtype, device=device)

    @staticmethod
    def num_bytes(shape: KVShape, *, batch: int, max_groups: int) -> int:
        """Bytes of one layer's bounds, for the ledger."""
        return 2 * batch * max_groups * shape.joint_dim * shape.dtype.itemsize

    @staticmethod
    def scratch_bytes(shape: KVShape, *, batch: int, max_groups: int) -> int:
        """Temporaries of one call of `score`: products per query head, twice."""
        return 8 * batch * max_groups * shape.num_query_heads

    def append(self, keys: Tensor, first_token: int) -> None:
        """See `KeyIndex.append`."""
        pages = keys.reshape(keys.shape[0], -1, self._group_tokens, *keys.shape[2:])
        first = first_token // self._group_tokens
        end = first + pages.shape[1]
        self._bounds[0, :, first:end] = pages.amin(dim=2)
        self._bounds[1, :, first:end] = pages.amax(dim=2)

    def score(self, query: Tensor, num_units: int) -> Tensor:
        """See `KeyIndex.score`; query heads of all KV heads of the row are added."""
        shape = self._shape
        grouped = query.view(query.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        low, high = self._bounds[:, :, :num_units].transpose(2, 3)
        above = torch.matmul(high, grouped.clamp_min(0).transpose(2, 3))
        below = torch.matmul(low, grouped.clamp_max(0).transpose(2, 3))
        return (above + below).float().sum(dim=(1, 3))

    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """See `KeyIndex.take_rows_from`."""
        assert isinstance(other, PageBoundsIndex)
        for bounds, source in zip(self._bounds, other._bounds, strict=True):
            bounds.copy_(source[rows])
