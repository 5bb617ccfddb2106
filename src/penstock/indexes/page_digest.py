"""PageDigestIndex: centre and mean half-extents of each page's keys (ArkVale's cuboid-mean)."""

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.indexes.base import KeyIndex


class PageDigestIndex(KeyIndex):
    """Scores a page by the largest product of the query with a box around the page's centre.

    Source: ArkVale (Chen et al., NeurIPS 2024), its bounding volume "cuboid-mean": the centre is
    the middle between the smallest and the largest component, and the half-extent is the mean
    distance of the keys' components from it. The most that a box can give is q . centre +
    |q| . half_extent.
    """

    def __init__(
        self, shape: KVShape, *, batch: int, max_groups: int, group_tokens: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the digests of `max_groups` pages.

        Args:
            shape: of a row; one KV head in it for selection per head.
        """
        self._shape = shape
        self._group_tokens = group_tokens
        size = (2, batch, max_groups, shape.num_kv_heads, shape.head_dim)
        self._digests = torch.zeros(size, dtype=shape.dtype, device=device)

    @staticmethod
    def num_bytes(shape: KVShape, *, batch: int, max_groups: int) -> int:
        """Bytes of one layer's digests, for the ledger."""
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
        # Halved before they are added: their sum may be more than float16 holds.
        centre = pages.amin(dim=2).mul_(0.5).add_(pages.amax(dim=2), alpha=0.5)
        self._digests[0, :, first:end] = centre
        self._digests[1, :, first:end] = (pages - centre.unsqueeze(2)).abs_().mean(dim=2)

    def score(self, query: Tensor, num_units: int) -> Tensor:
        """See `KeyIndex.score`; query heads of all KV heads of the row are added."""
        shape = self._shape
        grouped = query.view(query.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        centre, half_extent = self._digests[:, :, :num_units].transpose(2, 3)
        middle = torch.matmul(centre, grouped.transpose(2, 3))
        margin = torch.matmul(half_extent, grouped.abs().transpose(2, 3))
        return (middle + margin).float().sum(dim=(1, 3))

    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """See `KeyIndex.take_rows_from`."""
        assert isinstance(other, PageDigestIndex)
        for digests, source in zip(self._digests, other._digests, strict=True):
            digests.copy_(source[rows])
