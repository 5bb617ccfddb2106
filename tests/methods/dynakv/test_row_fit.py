"""AdaptiveClusters fitted row by row: the partition of all rows at once, in one row's memory."""

import gc
import tracemalloc
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.kmeans import chunk_elements, kmeans, nearest
from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters
from penstock.methods.dynakv.cluster_statistics import BLOCK_ENTRIES
from penstock.methods.dynakv.clustered_labels import ITERATIONS


def labels_of_all_rows_at_once(keys: Tensor, clusters: int, seed: int) -> NDArray[np.int64]:
    """The partition as it was before rows could be given one by one. [rows, tokens]"""
    elements = chunk_elements(keys.shape[0] * keys.shape[1])
    means = kmeans(
        keys, clusters, iterations=ITERATIONS, cosine=False, seed=seed, elements=elements
    )
    found = nearest(keys, means, cosine=False, elements=elements).numpy()
    return np.stack([np.unique(part, return_inverse=True)[1] for part in found])


def some_keys(rows: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    centres = 3 * torch.randn(rows, 7, dim, generator=generator)
    which = torch.randint(0, 7, (rows, tokens), generator=generator)
    keys = centres.gather(1, which.unsqueeze(2).expand(-1, -1, dim))
    keys += torch.randn(keys.shape, generator=generator)
    keys[:, : tokens // 3] = keys[:, :1]  # equal keys: clusters without a key have no number
    return keys.to(dtype)


@pytest.mark.parametrize(
    ("tokens", "dim", "dtype"),
    [
        (1, 5, torch.bfloat16), (90, 3, torch.float64), (700, 70, torch.float32),
        (1100, 16, torch.bfloat16),
    ],
)  # fmt: skip
def test_row_by_row_is_all_at_once(tokens: int, dim: int, dtype: torch.dtype) -> None:
    keys = some_keys(3, tokens, dim, dtype)
    kept = keys.clone()
    apart, whole = (
        AdaptiveClusters(
            rows=3, dim=dim, max_tokens=tokens, max_clusters=tokens, tokens_per_cluster=8, seed=5
        )
        for _ in range(2)
    )
    whole.fit(keys)
    apart.fit(keys.flip(1))  # `begin_fit` forgets it
    apart.begin_fit(tokens)
    for row in (2, 0, 1):
        apart.fit_row(row, keys[row])
    apart.end_fit()
    assert torch.equal(keys, kept)
    expected = labels_of_all_rows_at_once(keys, max(1, tokens // 8), 5)
    assert apart.length == whole.length == tokens
    for clusters in (apart, whole):
        np.testing.assert_array_equal(clusters.entries.cluster_of, expected)
    mine, theirs = apart.statistics, whole.statistics
    for name in ("sizes", "counts", "free"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    live = mine.sizes > 0
    np.testing.assert_array_equal(mine.centroids[live], theirs.centroids[live])
    np.testing.assert_array_equal(mine.deviations[live], theirs.deviations[live])
    np.testing.assert_array_equal(apart.thresholds, whole.thresholds)
    wide = keys.double().numpy()
    for row, labels in enumerate(expected):
        for cluster in range(labels.max() + 1):
            points = wide[row, labels == cluster]
            mean = points.mean(axis=0)
            spread = np.square(points - mean).sum()
            found = whole.statistics
            np.testing.assert_allclose(found.centroids[row, cluster], mean, rtol=1e-6)
            assert found.deviations[row, cluster] == pytest.approx(spread, rel=1e-6, abs=1e-12)


def test_a_threshold_is_a_share_of_the_spread_where_no_cluster_has_any() -> None:
    keys = torch.randn(2, 600, 4, generator=torch.Generator().manual_seed(0))
    clusters = AdaptiveClusters(
        rows=2, dim=4, max_tokens=600, max_clusters=600, tokens_per_cluster=1,
        threshold_quantile=0.0,
    )  # fmt: skip
    clusters.fit(keys)
    spread = keys.double().var(dim=1, correction=0).sum(dim=1).numpy()
    counts = clusters.statistics.counts
    np.testing.assert_allclose(clusters.thresholds, spread / counts, rtol=1e-6)


def test_rows_are_fitted_once_and_all_of_them() -> None:
    keys = some_keys(2, 40, 3, torch.float32)
    clusters = AdaptiveClusters(
        rows=2, dim=3, max_tokens=40, max_clusters=9, tokens_per_cluster=8
    )  # fmt: skip
    with pytest.raises(AssertionError, match="begin_fit"):
        clusters.fit_row(0, keys[0])
    clusters.begin_fit(40)
    with pytest.raises(AssertionError, match="begin_fit"):
        clusters.fit_row(0, keys[0, :39])
    clusters.fit_row(0, keys[0])
    with pytest.raises(AssertionError, match="once"):
        clusters.fit_row(0, keys[0])
    with pytest.raises(AssertionError, match="every row"):
        clusters.end_fit()
    with pytest.raises(AssertionError, match="fit"):
        clusters.append(keys[:, :1])


def peak_bytes(work: Callable[[], None]) -> tuple[int, int]:
    """Peaks of what numpy and torch allocate meanwhile, in bytes."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        # A process's first profile may warn of what this machine lacks; the second `work` may not.
        warnings.catch_warnings(action="ignore"),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        work()
    held = peak = 0
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    tracemalloc.start()
    work()
    numpys = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return numpys, peak


@pytest.mark.parametrize(("tokens", "rows", "dim"), [(3000, 8, 32), (3000, 1, 128)])
def test_the_ledgers_bytes_of_a_fit_are_tight(tokens: int, rows: int, dim: int) -> None:
    keys = some_keys(rows, tokens, dim, torch.bfloat16)
    clusters = AdaptiveClusters(
        rows=rows, dim=dim, max_tokens=tokens, max_clusters=tokens, tokens_per_cluster=16
    )  # fmt: skip

    def fit() -> None:
        clusters.fit(keys)

    said = AdaptiveClusters.scratch_bytes(
        dim=dim, tokens=tokens, tokens_per_cluster=16
    )  # fmt: skip
    numpys, torches = peak_bytes(fit)
    # The two peaks are not at the same time: k-means is torch's, and while numpy adds up, torch
    # has but one block of keys.
    block = 8 * dim * BLOCK_ENTRIES
    assert torches <= said
    assert numpys + block <= said
    assert max(torches, numpys + block) > said / 2
    # Of all rows or all keys in float64 it is a small part.
    assert said < 8 * tokens * dim
