"""Prompts in DeviceSemanticUnits: blocks at once, each as if it were alone, within the books."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.device.clusters import cluster_keys
from penstock.kernels.kmeans import kmeans, nearest
from penstock.methods.louiskv import device_index as semantic_units
from penstock.methods.louiskv.block_clusterer import ITERATIONS, num_clusters
from penstock.methods.louiskv.device_index import DeviceSemanticUnits, DeviceUnitSizes
from penstock.methods.louiskv.segment_runs import SegmentRuns


def made(
    sizes: DeviceUnitSizes, rows: int, dim: int, max_tokens: int, device: str = "cpu"
) -> DeviceSemanticUnits:
    shape = KVShape(
        num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=dim, dtype=torch.bfloat16
    )
    return DeviceSemanticUnits(
        shape, sizes, rows=rows, rows_per_sequence=1, max_tokens=max_tokens, wanted=16, tau=0.5,
        stride=0, every_step=False, scaling=1.0, device=torch.device(device),
    )  # fmt: skip


def drawn(rows: int, tokens: int, dim: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(rows, tokens, 1, dim, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("together", [1, 2 * 2 * 64, 1 << 17])
def test_blocks_at_once_are_blocks_alone(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Five blocks and a rest, in groups of one, two, or all; the second prompt comes behind."""
    monkeypatch.setattr(semantic_units, "POINTS_TOGETHER", together)
    sizes = DeviceUnitSizes(cluster_tokens=8, block_tokens=64, spare_units=40)
    assert sizes.blocks_together(2) == {1: 1, 256: 2, 1 << 17: 1024}[together]
    index, keys = made(sizes, 2, 16, 800), drawn(2, 420, 16)
    calls: list[int] = []
    whole = cluster_keys

    def counted(points: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append(points.shape[1])
        return whole(points, *args, **kwargs)

    monkeypatch.setattr(semantic_units, "cluster_keys", counted)
    index.take(keys[:, :355], 0)
    index.take(keys[:, 355:], 355)
    assert calls == {1: 6 * [1] + 2 * [1], 256: [2, 2, 1, 1, 1, 1], 1 << 17: [5, 1, 1, 1]}[together]
    base = 0
    for first, end in [
        *((64 * i, 64 * i + 64) for i in range(5)),
        (320, 355),
        (355, 419),
        (419, 420),
    ]:
        part, clusters = keys[:, first:end, 0], num_clusters(end - first, 8)
        given: dict[str, Any] = {"cosine": False, "elements": 1 << 16}
        means = kmeans(part, clusters, iterations=ITERATIONS, seed=semantic_units.SEED, **given)
        labels = nearest(part, means, **given)
        units = slice(base, base + clusters)
        assert torch.equal(index.means[:, units], means.to(torch.bfloat16))
        assert torch.equal(index.unit_of[:, first:end].long(), labels + base)
        order = labels.argsort(dim=1, stable=True) + first
        assert torch.equal(index.members[:, first:end].long(), order)
        base += clusters
    assert index.state.count.tolist() == [base, base]


def test_scratch_does_not_grow_with_the_prompt() -> None:
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16
    )
    sizes = DeviceUnitSizes(cluster_tokens=16, block_tokens=4096, spare_units=0)
    short, long, longer = (
        DeviceSemanticUnits.scratch_bytes(shape, sizes, rows=8, max_tokens=tokens)
        for tokens in (4096, 1 << 14, 1 << 17)
    )
    assert short < long == longer < 20 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("rows", "block", "tokens"), [(8, 4096, 32768), (2, 8192, 40000)])
def test_a_prompt_stays_within_the_ledger(rows: int, block: int, tokens: int) -> None:
    sizes = DeviceUnitSizes(cluster_tokens=16, block_tokens=block, spare_units=64)
    index, keys = made(sizes, rows, 128, tokens, "cuda"), drawn(rows, tokens, 128, "cuda")
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    index.take(keys, 0)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - base
    shape = KVShape(
        num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16
    )
    booked = DeviceSemanticUnits.scratch_bytes(shape, sizes, rows=rows, max_tokens=tokens)
    assert booked / 4 < taken <= 1.05 * booked


def test_a_run_that_clusters_end_is_merged_apart_from_the_open_one() -> None:
    runs = SegmentRuns()
    runs.put_clusters(0, 4)
    runs.put_clusters(7, 9)  # behind segments 4, 5 and 6
    merge = runs.merge(torch.tensor([14], dtype=torch.int32), 16)
    assert merge.targets[0, :9].tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert merge.targets[0, 9:14].tolist() == [8, 8, 9, 9, 10], "the last one stays alone"
    assert merge.counts.tolist() == [11]
