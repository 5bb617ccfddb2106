"""AdaptiveClusters: ten thousand random steps lose nothing, and statistics stay true."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters

MAX_TOKENS = 80


class Life:
    """A partition beside the keys that it was given."""

    def __init__(self, keys: Tensor, **options: object) -> None:
        rows, _, dim = keys.shape
        chosen: dict[str, object] = {
            "max_tokens": MAX_TOKENS, "max_clusters": 30, "tokens_per_cluster": 4, **options
        }  # fmt: skip
        self.clusters = AdaptiveClusters(rows=rows, dim=dim, **chosen)  # type: ignore[arg-type]
        self.clusters.fit(keys)
        self.keys = keys

    def append(self, keys: Tensor) -> NDArray[np.int64]:
        self.keys = torch.cat([self.keys[:, : self.clusters.length], keys], dim=1)
        return self.clusters.append(keys)

    def load(self, row: int, cluster: int) -> tuple[Tensor, NDArray[np.int64]]:
        members, waiting = self.clusters.members(row, cluster), self.clusters.buffered(row, cluster)
        positions = np.concatenate([waiting, members])
        return self.keys[row, positions], positions

    def points(self, row: int, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.keys[row, positions].double().numpy()

    def check_partition(self) -> None:
        """Every position in exactly one place, and all counts agree."""
        clusters, total = self.clusters, 0
        counts = clusters.entry_counts()
        for row in range(len(self.keys)):
            places = np.zeros(clusters.length, dtype=np.int64)
            for cluster in range(clusters.num_clusters):
                members, waiting = clusters.members(row, cluster), clusters.buffered(row, cluster)
                places[members] += 1
                places[waiting] += 1
                total += len(waiting)
                assert len(members) == clusters.statistics.sizes[row, cluster]
                assert len(members) + len(waiting) == counts[row, cluster]
                assert len(members) > 0 or len(waiting) == 0
            assert (places == 1).all()
            live = np.count_nonzero(clusters.statistics.sizes[row])
            assert clusters.statistics.free[row] == 30 - live
        assert clusters.entries.num_buffered == total
        waiting_in = [len(clusters.buffered(*at)) for at in clusters.entries.flagged()]
        assert sum(waiting_in) == total
        assert all(waiting_in)

    def check_statistics(self) -> None:
        """Against float64. A centroid is within 1e-5 of the largest key; a variance within 1e-4 of
        itself and 1e-5 of the largest square (float32, up to 80 updates)."""
        clusters, statistics = self.clusters, self.clusters.statistics
        largest = float(self.keys.abs().max()) + 1e-30
        variances = statistics.variances()
        for row, keys in enumerate(self.keys.double().numpy()):
            live = statistics.sizes[row].nonzero()[0]
            members = [clusters.members(row, cluster) for cluster in live.tolist()]
            counts = np.array([len(positions) for positions in members])
            first, points = np.cumsum(counts) - counts, keys[np.concatenate(members)]
            means = np.add.reduceat(points, first, axis=0) / counts[:, None]
            about = statistics.centroids[row, live].astype(np.float64)
            if clusters.update == "adaptive":
                assert (np.abs(about - means) <= 1e-5 * largest + 1e-7 * np.abs(means)).all()
                about = means
            spread = np.square(points - np.repeat(about, counts, axis=0)).sum(axis=1)
            variance = np.add.reduceat(spread, first) / counts
            near = np.maximum(1e-4 * variance, 1e-5 * largest**2)
            assert (np.abs(variances[row, live] - variance) <= near).all()


def drawn_keys(seed: int, rows: int, tokens: int, dim: int, drift: float = 0.0) -> Tensor:
    """Keys about a few centres, some of them alike."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(rows, 5, dim)) * 2.0 + drift
    ids = rng.integers(0, 5, size=(rows, tokens))
    noise = rng.normal(size=(rows, tokens, dim)) * rng.choice([0.0, 0.3, 1.0])
    keys = np.take_along_axis(centres, ids[:, :, None], axis=1) + noise
    return torch.from_numpy(keys).float()


class PartitionMachine(RuleBasedStateMachine):
    """A life of appends, retrievals, delayed and forced splits, crops and reorderings."""

    steps: ClassVar[int] = 0
    ROWS = 2

    @initialize(
        seed=st.integers(0, 99), tokens=st.integers(1, 24), dim=st.sampled_from([1, 3, 8]),
        buffer_entries=st.integers(1, 6), max_clusters=st.sampled_from([3, 30]),
        quantile=st.sampled_from([0.3, 0.9]),
        update=st.sampled_from(["adaptive", "adaptive", "adaptive", "static", "local"]),
    )  # fmt: skip
    def begin(self, seed: int, tokens: int, dim: int, max_clusters: int, **options: object) -> None:
        quantile = options.pop("quantile")
        options |= {"threshold_quantile": quantile, "recluster_tokens": 6}
        self.capacity, self.dim = max_clusters, dim
        self.life = Life(
            drawn_keys(seed, self.ROWS, tokens, dim), max_clusters=max_clusters, **options
        )

    @property
    def adaptive(self) -> bool:
        return hasattr(self, "life") and self.life.clusters.update == "adaptive"

    @rule(seed=st.integers(0, 99), tokens=st.integers(1, 3), drift=st.sampled_from([0.0, 3.0]))
    def append(self, seed: int, tokens: int, drift: float) -> None:
        life, clusters = self.life, self.life.clusters
        if clusters.length + tokens > MAX_TOKENS:
            with pytest.raises(CacheStateError, match="room"):
                clusters.append(drawn_keys(seed, self.ROWS, tokens, self.dim))
            return
        for key in drawn_keys(seed, self.ROWS, tokens, self.dim, drift).unbind(1):
            before = clusters.statistics.sizes.copy(), clusters.statistics.centroids.copy()
            flags, free = clusters.entries.buffer_counts.copy(), clusters.statistics.free.copy()
            found = life.append(key[:, None])[:, 0]
            for row, number in enumerate(found.tolist()):
                cluster = max(number, ~number)
                if clusters.update != "local" or number < 0:
                    # Otherwise it has just been clustered with those that waited.
                    self.check_nearest(row, cluster, key[row], *before)
                if clusters.update == "adaptive":
                    flagged = bool(flags[row, cluster])
                    self.check_branch(row, cluster, number < 0, flagged, bool(free[row] == 0))

    def check_nearest(
        self, row: int, cluster: int, key: Tensor, sizes: NDArray[np.int32],
        centroids: NDArray[np.float32],
    ) -> None:  # fmt: skip
        gaps = centroids[row].astype(np.float64) - key.double().numpy()
        distances = np.where(sizes[row] > 0, np.square(gaps).sum(axis=1), np.inf)
        assert distances[cluster] <= distances.min() * (1 + 1e-5) + 1e-9

    def check_branch(self, row: int, cluster: int, waits: bool, flagged: bool, full: bool) -> None:
        """Whether an entry joined or waits, by the variance in float64."""
        clusters = self.life.clusters
        if flagged:
            assert waits
            return
        position = np.array([clusters.length - 1])
        members = clusters.members(row, cluster)
        points = self.life.points(row, np.union1d(members, position))
        variance = np.square(points - points.mean(axis=0)).sum(axis=1).mean()
        tau = float(clusters.thresholds[row])
        if full or variance < tau * (1 - 1e-4) - 1e-6:
            assert not waits
        elif variance > tau * (1 + 1e-4) + 1e-6:
            assert waits

    @precondition(lambda self: self.adaptive)
    @rule(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.3, 1.0]))
    def step(self, seed: int, share: float) -> None:
        """Retrieve some clusters; afterwards none of those waits, and the buffers are small."""
        clusters = self.life.clusters
        size = (self.ROWS, clusters.num_clusters)
        chosen = np.random.default_rng(seed).random(size) < share
        done = clusters.adapt(chosen, self.life.load)
        assert not (clusters.entries.buffer_counts[:, : chosen.shape[1]][chosen]).any()
        assert clusters.entries.num_buffered < clusters._buffer_entries
        for split in done.splits:
            if split.child >= 0:
                assert 0 < split.moves.sum() <= len(split.moves) - split.moves.sum()
                assert clusters.entries.buffer_counts[split.row, split.child] == 0

    @precondition(lambda self: self.adaptive)
    @rule(which=st.integers(0, 1000))
    def force_split(self, which: int) -> None:
        clusters = self.life.clusters
        rows, numbers = clusters.entry_counts().nonzero()
        at = int(rows[which % len(rows)]), int(numbers[which % len(rows)])
        before = set(self.life.load(*at)[1].tolist())
        done = clusters.split(*at, *self.life.load(*at))
        parts = [set(clusters.members(at[0], c).tolist()) for c in (at[1], done.child) if c >= 0]
        assert set.union(*parts) == before
        assert sum(map(len, parts)) == len(before)

    @rule(share=st.floats(0.0, 1.0))
    def crop(self, share: float) -> None:
        length = max(1, round(share * self.life.clusters.length))
        self.life.clusters.crop(length, self.life.load)
        assert self.life.clusters.length == length

    @rule(rows=st.lists(st.integers(0, 1), min_size=2, max_size=2), same=st.booleans())
    def reorder(self, rows: list[int], same: bool) -> None:
        old, order = self.life.clusters, torch.tensor(rows)
        if same:
            old.take_rows_from(old, order)
        else:
            keys = drawn_keys(0, self.ROWS, 3, self.dim)
            new = Life(
                keys, max_clusters=self.capacity, update=old.update, recluster_tokens=6,
                buffer_entries=old._buffer_entries,
            )  # fmt: skip
            new.clusters.take_rows_from(old, order)
            self.life.clusters = new.clusters
        self.life.keys = self.life.keys[order]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "life"):
            PartitionMachine.steps += 1
            spare = 30 - self.capacity
            self.life.clusters.statistics.free += spare
            self.life.check_partition()
            self.life.clusters.statistics.free -= spare
            self.life.check_statistics()


@pytest.mark.slow
def test_nothing_is_lost_in_thousands_of_steps() -> None:
    PartitionMachine.steps = 0
    lengths = settings(max_examples=30, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(PartitionMachine, settings=lengths)
    assert PartitionMachine.steps >= 1_000
