"""BlockClusterer: k-means over a prompt's keys, block by block (LouisKV)."""

import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.kmeans import kmeans, kmeans_bytes, mean_distances, nearest

ITERATIONS = 10
FEW_CLUSTERS = 8


class Clustering(NamedTuple):
    """Clusters of one block of tokens."""

    means: Tensor
    """float32 [rows, clusters, head_dim]"""
    labels: Tensor
    """Cluster of each token. int64 [rows, tokens]"""
    squares: Tensor | None = None
    """Mean squared length of the keys of each, where it was asked for. float32 [rows, clusters]"""


class BlockClusterer:
    """Collects keys and clusters each block when it is full.

    Threaded, beside the prefill, while the next block fills. At most one block of an index is
    being clustered; the next one waits for it, which is the one place where a prefill can have to
    wait. Otherwise at once, in memory that is held only while keys wait (`release`).
    """

    def __init__(
        self, like: Tensor, *, rows: int, block_tokens: int, cluster_tokens: int, cosine: bool,
        elements: int, threaded: bool = True, seed: int = 0, squares: bool = False,
    ) -> None:  # fmt: skip
        """Allocate both halves, if they are to be held all the time.

        Args:
            like: [..., head_dim], of the dtype and on the device of the keys.
            elements: of a chunk's temporaries (`kernels.kmeans.chunk_elements`).
            squares: make the clusters' mean squared lengths too.
        """
        self._squares = squares
        self._like, self._threaded = like, threaded
        self._size = (1 + threaded, rows, block_tokens, like.shape[-1])
        self._halves: Tensor | None = like.new_empty(self._size) if threaded else None
        self._cluster_tokens, self._cosine = cluster_tokens, cosine
        self._elements, self._seed = elements, seed
        self._filling = 0
        self.start, self.count = 0, 0
        """Position of the first key that waits, and how many wait."""
        self._job: tuple[int, Future[Clustering]] | None = None

    @staticmethod
    def num_bytes(
        *, rows: int, block_tokens: int, cluster_tokens: int, head_dim: int, itemsize: int,
        elements: int, threaded: bool = True, squares: bool = False,
    ) -> int:  # fmt: skip
        """Bytes of the block or both halves and of one clustering under way, for the ledger."""
        clusters = num_clusters(block_tokens, cluster_tokens)
        held = (1 + threaded) * rows * block_tokens * head_dim * itemsize
        made = rows * (4 * clusters * head_dim + 16 * block_tokens)
        made += rows * (8 * clusters + 4 * block_tokens) * squares
        return held + made + kmeans_bytes(rows, clusters, head_dim, elements)

    @property
    def block_tokens(self) -> int:
        """Keys of a full block."""
        return self._size[2]

    @property
    def waiting(self) -> Tensor:
        """Keys that wait; `count` is not 0. [rows, count, head_dim]"""
        assert self._halves is not None
        return self._halves[self._filling, :, : self.count]

    def release(self) -> None:
        """Forget the keys that wait, and give their memory back where it is not kept."""
        self.count = 0
        if not self._threaded:
            self._halves = None

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
        if self._halves is None:
            self._halves = self._like.new_empty(self._size)
        self._halves[self._filling, :, self.count : end] = keys
        self.count = end
        if end < self.block_tokens:
            return []
        if not self._threaded:
            clustered, self.count = self.cluster(self.waiting), 0
            return [(self.start, clustered)]
        done = self.finish()
        future: Future[Clustering] = Future()
        self._job = (self.start, future)
        args = (self.waiting, future, _in_stream_of(self.waiting))
        threading.Thread(target=self._run, args=args, daemon=True).start()
        self._filling, self.count = 1 - self._filling, 0
        return done

    @property
    def room(self) -> int:
        """Keys until the block is full."""
        return self.block_tokens - self.count

    def _run(
        self, keys: Tensor, future: "Future[Clustering]", stream: AbstractContextManager[Any]
    ) -> None:
        try:
            with stream:
                clustered = self.cluster(keys)
            future.set_result(clustered)
        except BaseException as error:
            future.set_exception(error)

    def cluster(self, keys: Tensor) -> Clustering:
        """Cluster some keys now. keys: [rows, tokens, head_dim]"""
        clusters = num_clusters(keys.shape[1], self._cluster_tokens)
        cosine, elements = self._cosine, self._elements
        with torch.no_grad():
            means = kmeans(
                keys, clusters, iterations=ITERATIONS, cosine=cosine, seed=self._seed,
                elements=elements,
            )  # fmt: skip
            labels = nearest(keys, means, cosine=cosine, elements=elements)
            squares = None
            if self._squares:
                # Were the centroids the very means: after the last iteration distances count.
                squares = mean_distances(keys, means, labels, elements=elements)
                squares += means.square().sum(dim=2)
            return Clustering(means, labels, squares)

    def finish(self) -> list[tuple[int, Clustering]]:
        """Wait for the block under way, if there is one.

        What its thread raised is raised here, again and again until the block is forgotten: its
        tokens belong to no unit.
        """
        if self._job is None:
            return []
        start, future = self._job
        done = [(start, future.result())]
        self._job = None
        return done

    def forget_from(self, position: int) -> None:
        """Forget the keys at and after `position`; waits for a block that begins there."""
        self.count = max(0, min(self.count, position - self.start))
        if self._job is not None and self._job[0] >= position:
            self._job[1].exception()
            self._job = None


def _in_stream_of(keys: Tensor) -> AbstractContextManager[Any]:
    """What a thread works in, so that a GPU orders its work after the caller's."""
    if not keys.is_cuda:
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream(keys.device))
    return stream


def num_clusters(tokens: int, cluster_tokens: int) -> int:
    """Clusters of a block: one fewer than `tokens / cluster_tokens`, so that a rest that is too
    small for clusters has room to be a unit of its own.

    A block of a few clusters, the end of a prompt, has as many as its tokens ask for: what is asked
    stands there, and one mean for 33 tokens was found too coarse
    (research/notes/2026-11-21-device-tier.md).
    """
    if tokens < FEW_CLUSTERS * cluster_tokens:
        return -(-tokens // cluster_tokens)
    return max(1, tokens // cluster_tokens - 1)
