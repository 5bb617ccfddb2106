"""PromptClusters: which tokens of a prompt each cluster holds, side by side (LouisKV)."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.methods.louiskv.block_clusterer import num_clusters


class Block(NamedTuple):
    """A run of tokens that was clustered by itself, at the same place in every row."""

    start: int
    end: int
    first_unit: int
    end_unit: int


class PromptClusters:
    """Which tokens each cluster has, side by side, and how many of them may be selected.

    Clusters of all rows have the same numbers. Positions that no cluster holds are their own place
    in `members`.
    """

    def __init__(self, *, rows: int, max_tokens: int, capacity: int, device: torch.device) -> None:
        dtype = integer_dtype(max_tokens)
        places = torch.arange(max_tokens, dtype=dtype, device=device)
        self.members = places.repeat(rows, 1)
        """Positions, those of a cluster side by side and ascending. [rows, max_tokens]"""
        size = (rows, capacity)
        self._offsets = torch.zeros(size, dtype=torch.int32, device=device)
        self.first = torch.zeros(size, dtype=torch.int32, device=device)
        """Where the tokens of a cluster that may be selected begin in `members`."""
        self.sizes = torch.zeros(size, dtype=torch.int32, device=device)
        """How many they are."""
        self._blocks: list[Block] = []
        self._counted = 0
        """Blocks whose tokens may all be selected, but for sinks and padding."""

    @staticmethod
    def num_bytes(rows: int, max_tokens: int, capacity: int) -> int:
        """Bytes of the tables, for the ledger."""
        return rows * (max_tokens * integer_dtype(max_tokens).itemsize + 12 * capacity)

    @property
    def used(self) -> int:
        """Clusters so far."""
        return self._blocks[-1].end_unit if self._blocks else 0

    def add(self, start: int, labels: Tensor, clusters: int) -> None:
        """Take in a block that was clustered; its clusters are numbered from `used` on.

        Args:
            start: position of the block's first token.
            labels: cluster of each token within the block. int64 [rows, tokens]
        """
        block = Block(start, start + labels.shape[1], self.used, self.used + clusters)
        self._blocks.append(block)
        order = labels.argsort(dim=1, stable=True)
        self.members[:, block.start : block.end] = order + start
        self._set_offsets(block, _sizes(labels, clusters))

    def _set_offsets(self, block: Block, sizes: Tensor) -> None:
        offsets = sizes.cumsum(dim=1) - sizes + block.start
        self._offsets[:, block.first_unit : block.end_unit] = offsets

    def _labels(self, block: Block) -> Tensor:
        """Cluster within the block of each place in `members`. int64 [rows, tokens]"""
        offsets = self._offsets[:, block.first_unit : block.end_unit].contiguous()
        places = torch.arange(block.start, block.end, dtype=torch.int32, device=offsets.device)
        places = places.expand(len(offsets), -1).contiguous()
        # Empty clusters begin where the next one does: the last of them has the token.
        return torch.searchsorted(offsets, places, right=True) - 1

    def count(self, first: Tensor, end: int) -> None:
        """Count the tokens that may be selected: at or after `first`, before `end`.

        Args:
            first: per row; does not change while the sequence lives. int64 [rows]
            end: never less than before, but for crops.
        """
        for block in self._blocks[self._counted :]:
            units = slice(block.first_unit, block.end_unit)
            positions = self.members[:, block.start : block.end]
            labels = self._labels(block)
            hidden = positions < first[:, None]
            for target, which in ((self.first, hidden), (self.sizes, ~hidden & (positions < end))):
                target[:, units] = _sizes(labels, units.stop - units.start, which)
            self.first[:, units] += self._offsets[:, units]
            self._counted += block.end <= end

    def crop(self, length: int, cluster_tokens: int) -> tuple[slice, Tensor] | None:
        """Forget the tokens at and after `length`.

        A block that is cut has more clusters than it needs: neighbours by number become one.

        Returns:
            The clusters of that block as they were numbered, and which new one (counted from the
            block's first) and with how many tokens each of them goes into: int64
            [2, rows, clusters]; None when no block was cut.
        """
        self._blocks = [block for block in self._blocks if block.start < length]
        folded = None
        if self._blocks and self._blocks[-1].end > length:
            folded = self._fold(self._blocks.pop(), length, cluster_tokens)
        dtype, device = self.members.dtype, self.members.device
        end = self.members.shape[1]
        self.members[:, length:] = torch.arange(length, end, dtype=dtype, device=device)
        self._counted = 0
        return folded

    def _fold(self, block: Block, length: int, cluster_tokens: int) -> tuple[slice, Tensor]:
        positions = self.members[:, block.start : block.end].long()
        clusters = block.end_unit - block.first_unit
        labels = torch.empty_like(positions)
        labels.scatter_(1, positions - block.start, self._labels(block))
        labels = labels[:, : length - block.start]
        sizes = _sizes(labels, clusters)
        fewer = min(clusters, num_clusters(length - block.start, cluster_tokens))
        share = -(-clusters // fewer)
        into = torch.arange(clusters, device=labels.device) // share
        self.add(block.start, labels // share, -(-clusters // share))
        return slice(block.first_unit, block.end_unit), torch.stack([into.expand_as(sizes), sizes])

    def take_rows_from(self, other: "PromptClusters", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        self._blocks, self._counted = list(other._blocks), other._counted
        for name in ("members", "_offsets", "first", "sizes"):
            getattr(self, name).copy_(getattr(other, name)[rows])


def _sizes(labels: Tensor, clusters: int, which: Tensor | None = None) -> Tensor:
    """Tokens of each cluster, or those of them that are true in `which`. int64 [rows, clusters]"""
    ones = torch.ones_like(labels) if which is None else which.long()
    return labels.new_zeros(len(labels), clusters).scatter_add_(1, labels, ones)


def integer_dtype(largest: int) -> torch.dtype:
    """The narrowest of int16 and int32 that holds numbers up to `largest`."""
    return torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32
