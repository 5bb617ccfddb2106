"""BlockClusterer: k-means over a prompt's keys, block by block beside the prefill (LouisKV)."""

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
