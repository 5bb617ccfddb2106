"""PromptClusters: clusters of a prompt's keys, made block by block beside the prefill (LouisKV)."""

import threading
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.kmeans import kmeans, kmeans_bytes, nearest

ITERATIONS = 10


class Clustering(NamedTuple):
    """Clusters of one block of tokens."""

    means: Tensor
    """float32 [rows, clusters, head_dim]"""
    labels: Tensor
    """Cluster of each token. int64 [rows, tokens]"""


class BlockClusterer:
    """Collects keys and clusters each full block on a thread, while the next one fills.

    At most one block of an index is being clustered; the next one waits for it, which is the one
    place where a prefill can have to wait.
    """

    def __init__(
        self, like: Tensor, *, rows: int, block_tokens: int, cluster_tokens: int, cosine: bool,
        elements: int, seed: int = 0,
    ) -> None:  # fmt: skip
        """Allocate both halves.

        Args:
            like: [..., head_dim], of the dtype and on the device of the keys.
            elements: of a chunk's temporaries (`kernels.kmeans.chunk_elements`).
        """
        self._halves = like.new_empty(2, rows, block_tokens, like.shape[-1])
        self._cluster_tokens, self._cosine = cluster_tokens, cosine
        self._elements, self._seed = elements, seed
        self._filling = 0
        self.start, self.count = 0, 0
        """Position of the first key that waits, and how many wait."""
        self._job: tuple[int, Future[Clustering]] | None = None

    @staticmethod
    def num_bytes(
        *, rows: int, block_tokens: int, cluster_tokens: int, head_dim: int, itemsize: int,
        elements: int,
    ) -> int:  # fmt: skip
        """Bytes of both halves and of one clustering under way, for the ledger."""
        clusters = num_clusters(block_tokens, cluster_tokens)
        held = 2 * rows * block_tokens * head_dim * itemsize
        made = rows * (4 * clusters * head_dim + 16 * block_tokens)
        return held + made + kmeans_bytes(rows, clusters, head_dim, elements)

    @property
    def block_tokens(self) -> int:
        """Keys of a full block."""
        return self._halves.shape[2]

    @property
    def waiting(self) -> Tensor:
        """Keys that wait. [rows, count, head_dim]"""
        return self._halves[self._filling, :, : self.count]

    def take(self, keys: Tensor, position: int) -> list[tuple[int, Clustering]]:
        """Take keys in; begins to cluster whatever becomes full.

        Args:
            keys: not more than fill the block (see `room`). [rows, tokens, head_dim]
            position: of the first key; follows on those that wait, if any do.

        Returns:
            Blocks that are done: first position and clusters.
        """
        if self.count == 0:
            self.start = position
        end = self.count + keys.shape[1]
        self._halves[self._filling, :, self.count : end] = keys
        self.count = end
        if end < self.block_tokens:
            return []
        done = self.finish()
        future: Future[Clustering] = Future()
        self._job = (self.start, future)
        threading.Thread(target=self._run, args=(self.waiting, future), daemon=True).start()
        self._filling, self.count = 1 - self._filling, 0
        return done

    @property
    def room(self) -> int:
        """Keys until the block is full."""
        return self.block_tokens - self.count

    def _run(self, keys: Tensor, future: "Future[Clustering]") -> None:
        try:
            future.set_result(self.cluster(keys))
        except BaseException as error:
            future.set_exception(error)

    def cluster(self, keys: Tensor) -> Clustering:
        """Cluster some keys now. keys: [rows, tokens, head_dim]"""
        clusters = num_clusters(keys.shape[1], self._cluster_tokens)
        how = {"cosine": self._cosine, "elements": self._elements}
        with torch.no_grad():
            means = kmeans(keys, clusters, iterations=ITERATIONS, seed=self._seed, **how)  # type: ignore[arg-type]
            return Clustering(means, nearest(keys, means, **how))  # type: ignore[arg-type]

    def finish(self) -> list[tuple[int, Clustering]]:
        """Wait for the block under way, if there is one; raises what its thread raised."""
        if self._job is None:
            return []
        (start, future), self._job = self._job, None
        return [(start, future.result())]

    def drop(self) -> None:
        """Give up everything that waits or is under way."""
        self.count = 0
        if self._job is not None:
            self._job[1].exception()
            self._job = None


def num_clusters(tokens: int, cluster_tokens: int) -> int:
    """Clusters of a block: one fewer than `tokens / cluster_tokens`, so that a rest that is too
    small for clusters has room to be a unit of its own."""
    return max(1, tokens // cluster_tokens - 1)


class PromptClusters:
    """Which tokens each cluster has, side by side, and how many of them may be selected.

    Clusters of all rows have the same numbers; blocks are at the same positions in every row.
    Positions that no cluster holds are their own place in `members`.
    """

    def __init__(self, *, rows: int, max_tokens: int, capacity: int, device: torch.device) -> None:
        dtype = integer_dtype(max_tokens)
        places = torch.arange(max_tokens, dtype=dtype, device=device)
        self.members = places.repeat(rows, 1)
        """Positions, those of a cluster side by side and ascending. [rows, max_tokens]"""
        self._unit_of = torch.full_like(self.members, -1)
        size = (rows, capacity)
        self.first = torch.zeros(size, dtype=torch.int32, device=device)
        """Where the tokens of a cluster that may be selected begin in `members`."""
        self.sizes = torch.zeros(size, dtype=torch.int32, device=device)
        """How many they are."""
        self._blocks: list[tuple[int, int, int, int]] = []
        self.used = 0
        self._counted = 0
        self._hidden_before: Tensor | None = None

    @staticmethod
    def num_bytes(rows: int, max_tokens: int, capacity: int) -> int:
        """Bytes of the tables, for the ledger."""
        itemsize = integer_dtype(max_tokens).itemsize
        return rows * (2 * max_tokens * itemsize + 8 * capacity)

    @property
    def end(self) -> int:
        """Position behind the last block."""
        return self._blocks[-1][1] if self._blocks else 0

    def add(self, start: int, labels: Tensor, clusters: int) -> int:
        """Take in a block that was clustered; returns the number of its first cluster.

        Args:
            start: position of the block's first token.
            labels: cluster of each token within the block. int64 [rows, tokens]
        """
        first_unit, self.used = self.used, self.used + clusters
        end = start + labels.shape[1]
        self._unit_of[:, start:end] = labels + first_unit
        self._blocks.append((start, end, first_unit, self.used))
        self._lay_out(self._blocks[-1])
        self._recount()
        return first_unit

    def _lay_out(self, block: tuple[int, int, int, int]) -> None:
        start, end, unit, end_unit = block
        labels = self._unit_of[:, start:end].long() - unit
        order = labels.argsort(dim=1, stable=True)
        self.members[:, start:end] = order + start
        counts = labels.new_zeros(labels.shape[0], end_unit - unit)
        counts.scatter_add_(1, labels, torch.ones_like(labels))
        self.first[:, unit:end_unit] = counts.cumsum(dim=1) - counts + start

    def _recount(self) -> None:
        if self._counted:
            for block in self._blocks:
                self._lay_out(block)
        self.sizes.zero_()
        self._counted = 0

    def count(self, first: Tensor, end: int) -> None:
        """Count the tokens that may be selected: at or after `first`, before `end`.

        Args:
            first: per row; does not change while the sequence lives. int64 [rows]
        """
        end = min(end, self.end)
        if end <= self._counted or self.used == 0:
            return
        units = self._unit_of[:, self._counted : end].long()
        positions = torch.arange(self._counted, end, device=units.device)
        clustered, hidden = units >= 0, positions < first[:, None]
        units = units.clamp_min(0)
        self.sizes.scatter_add_(1, units, (clustered & ~hidden).int())
        self.first.scatter_add_(1, units, (clustered & hidden).int())
        self._counted = end

    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""
        kept = [block for block in self._blocks if block[0] < length]
        self._blocks = [(s, min(e, length), u, n) for s, e, u, n in kept]
        self.used = self._blocks[-1][3] if self._blocks else 0
        self._unit_of[:, length:] = -1
        dtype, device = self.members.dtype, self.members.device
        end = self.members.shape[1]
        self.members[:, length:] = torch.arange(length, end, dtype=dtype, device=device)
        self._counted = max(1, self._counted)
        self._recount()

    def take_rows_from(self, other: "PromptClusters", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`."""
        self._blocks, self.used = list(other._blocks), other.used
        self._counted = other._counted
        for name in ("members", "_unit_of", "first", "sizes"):
            getattr(self, name).copy_(getattr(other, name)[rows])


def integer_dtype(largest: int) -> torch.dtype:
    """The narrowest of int16 and int32 that holds numbers up to `largest`."""
    return torch.int16 if largest <= torch.iinfo(torch.int16).max else torch.int32
