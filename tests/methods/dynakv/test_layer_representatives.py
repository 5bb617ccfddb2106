"""Representatives on flash: the same selections as from memory, and the memory of two layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import BudgetError, ConfigError, FetchError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.kernels.native.compiled import kernel
from penstock.methods.dynakv.centroid_scan import CentroidScan
from penstock.methods.dynakv.layer import ClusterLayer
from penstock.methods.dynakv.policy import DynaKV
from penstock.methods.dynakv.representative_file import RepresentativeBuffer, RepresentativeFile
from penstock.storage.memory_file import MemoryFile

SHAPE = KVShape(num_layers=4, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
MAX_TOKENS = 400


def make(
    place: str, *, batch: int = 1, store: str = "memory", num_layers: int = 4,
    limit_bytes: int | None = None, **options: Any,
) -> TieredRuntime:  # fmt: skip
    """A cache that selects 48 tokens of clusters of 8."""
    wanted: dict[str, Any] = {
        "selected_tokens": 48, "window_tokens": 6, "sink_tokens": 2, "tokens_per_cluster": 8,
        "buffer_entries": 4, "representatives": place,
    }  # fmt: skip
    config = RuntimeSettings(
        shape=replace(SHAPE, num_layers=num_layers), policy=DynaKV(**wanted | options),
        limit_bytes=limit_bytes, store=store, max_tokens=MAX_TOKENS, exact=False, adapter=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    return TieredRuntime(config, batch)


class Script:
    """The same random tokens for any cache, keys that move on as the sequence does."""

    def __init__(self, batch: int = 1) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.batch, self._done = batch, 0
        self._centres = torch.randn(40, 16, generator=self._generator)

    def _draw(self, heads: int, tokens: int) -> Tensor:
        first = self._done // 12
        topics = torch.randint(first, first + 8, (self.batch, heads, tokens),
                               generator=self._generator) % 40  # fmt: skip
        noise = torch.randn(*topics.shape, 16, generator=self._generator)
        return self._centres[topics] + 0.3 * noise

    def run(self, runtimes: list[TieredRuntime], tokens: int) -> None:
        """One forward pass through all layers of all caches, which must give the same."""
        for layer in range(runtimes[0].settings.shape.num_layers):
            keys, values, query = (self._draw(heads, tokens) for heads in (2, 2, 4))
            call = AttentionCall(query=2 * query, keys=keys, values=values, scaling=0.25)
            first, *others = (runtime.attend(layer, call) for runtime in runtimes)
            for other in others:
                torch.testing.assert_close(other, first, rtol=0, atol=0)
        self._done += tokens


def layers(runtime: TieredRuntime) -> Iterator[ClusterLayer]:
    for layer in runtime.layers:
        assert isinstance(layer, ClusterLayer)
        layer.drain()
        yield layer


def check_same(memory: TieredRuntime, flash: TieredRuntime) -> None:
    """The same partition, statistics and centroids; those on flash are read again."""
    for ours, theirs in zip(layers(memory), layers(flash), strict=True):
        np.testing.assert_array_equal(theirs.followed.owners(), ours.followed.owners())
        one, other = ours.followed.clusters, theirs.followed.clusters
        np.testing.assert_array_equal(other.statistics.sizes, one.statistics.sizes)
        np.testing.assert_array_equal(other.statistics.deviations, one.statistics.deviations)
        assert theirs.representatives is not None
        theirs.representatives.need()  # what was asked ahead has come
        theirs.representatives._file.buffer.vectors.fill(1e3)
        theirs.representatives._file.buffer.holder = None
        theirs.representatives.need()
        for row, count in enumerate(one.statistics.counts.tolist()):
            found, wanted = other.statistics.centroids[row], one.statistics.centroids[row]
            np.testing.assert_array_equal(found[:count], wanted[:count])
    counts = [(r.stats.decode.units_wanted, r.stats.decode.units_hit) for r in (memory, flash)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("num_layers", "options"),
    [
        (1, {}), (3, {"store": "auto", "batch": 3}), (2, {"store": "ufs", "update": "static"}),
        (2, {"layout": "tokens", "threshold_factor": 0.0}),
        (4, {"virtual": True, "reuse_tokens": 96}), (2, {"virtual": True}),
        (2, {"reuse_tokens": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_selections_are_those_of_memory(num_layers: int, options: dict[str, Any]) -> None:
    both = [make(place, num_layers=num_layers, **options) for place in ("memory", "flash")]
    script = Script(options.get("batch", 1))
    for tokens in (70, *[1] * 5, 20, 1, 1):
        script.run(both, tokens)
    check_same(*both)
    script.run(both, 1)
    for runtime in both:
        runtime.crop(80)
    for _ in range(3):
        script.run(both, 1)
    check_same(*both)
    for runtime in both:
        runtime.reset()
    for tokens in (40, 1, 1):
        script.run(both, tokens)
    check_same(*both)
    for runtime in both:
        runtime.close()


def test_rows_are_reordered_and_grow() -> None:
    """Beams; the clusters of another batch are those of the rows that it was made from."""
    both = [make(place, batch=2, num_layers=3) for place in ("memory", "flash")]
    script = Script(2)
    for step, tokens in enumerate((70, *[1] * 25)):
        if step in (6, 15):
            for runtime in both:
                runtime.select_rows(torch.tensor([1, 0] if step == 6 else [1, 1]))
        if step == 21:
            for runtime in both:
                runtime.select_rows(torch.tensor([0, 1, 1]))
            script.batch = 3
        script.run(both, tokens)
    check_same(*both)
    for runtime in both:
        runtime.close()


def test_reads_and_writes_are_counted() -> None:
    both, script = [make(place) for place in ("memory", "flash")], Script()
    script.run(both, 90)
    script.run(both, 1)
    before = [replace(runtime.stats.decode) for runtime in both]
    for _ in range(10):
        script.run(both, 1)
    for runtime in both:
        runtime.layers[-1].drain()
    memory, flash = (
        {name: getattr(runtime.stats.decode, name) - getattr(old, name) for name in (
            "reads", "read_bytes", "writes", "written_bytes")}
        for runtime, old in zip(both, before, strict=True)
    )  # fmt: skip
    index = next(iter(layers(both[1]))).followed.clusters
    least = 10 * 4 * 2 * 88 // 8 * 64  # steps, layers, rows, clusters of the prompt, bytes of each
    assert least <= flash["read_bytes"] - memory["read_bytes"] <= 3 * least
    assert flash["reads"] - memory["reads"] == 10 * 4 * 2, "one of each row"
    assert flash["writes"] > memory["writes"]
    assert 0 < flash["written_bytes"] - memory["written_bytes"] <= 10 * 4 * 2 * 3 * 512
    assert index.statistics.centroids.base is not None
    for runtime in both:
        runtime.close()


@pytest.mark.parametrize("num_layers", [2, 9])
def test_memory_is_that_of_two_layers(num_layers: int) -> None:
    """Of two layers nothing is saved but the 8-bit copies, which compiled kernels alone keep; what
    the buffers take is rounded up to sectors."""
    memory, flash = (make(place, num_layers=num_layers) for place in ("memory", "flash"))
    for runtime in (memory, flash):
        Script().run([runtime], 60)
    before, after = memory.report(), flash.report()
    assert after.used_bytes == flash.plan.total_bytes
    policy = flash.policy
    assert isinstance(policy, DynaKV)
    capacity = policy.cluster_sizes.capacity(MAX_TOKENS)
    centroids = 2 * capacity * 16 * 4  # of a layer
    saved = before.items["index"] - after.items["index"]
    copies = CentroidScan.num_bytes(2, capacity, 16)
    copies -= CentroidScan.num_bytes(2, capacity, 16, copies=False)
    assert (copies > 0) == (kernel("copy_centroids") is not None)
    assert saved == num_layers * (centroids + copies), "and their 8-bit copies"
    buffers = RepresentativeBuffer.num_bytes(2, capacity, 16, 512)
    assert centroids <= buffers < centroids + 512
    assert before.used_bytes - after.used_bytes == saved - 2 * buffers
    if num_layers > 2 or copies:
        assert before.used_bytes > after.used_bytes
    else:
        assert 0 <= after.used_bytes - before.used_bytes < 2 * 512
    arrays = {
        layer.followed.clusters.statistics.centroids.__array_interface__["data"][0]
        for layer in layers(flash)
    }
    assert len(arrays) == 2
    for runtime in (memory, flash):
        runtime.close()


def test_auto_takes_flash_where_the_index_would_not_fit() -> None:
    sizes: dict[str, int] = {}
    choices: dict[str, Any] = {"tokens_per_cluster": None, "write_buffers": 16}
    for place in ("memory", "flash"):
        runtime = make(place, num_layers=16, **choices)
        sizes[place] = runtime.plan.total_bytes
        runtime.close()
    assert sizes["flash"] < sizes["memory"]
    limits = ((None, "memory"), (sizes["memory"], "memory"), (sizes["flash"], "flash"))
    for limit, place in limits:
        runtime = make("auto", num_layers=16, limit_bytes=limit, **choices)
        assert isinstance(runtime.policy, DynaKV)
        assert runtime.policy.representatives == place
        assert limit is None or runtime.plan.total_bytes <= limit
        runtime.close()
    with pytest.raises(BudgetError):
        make("auto", num_layers=16, limit_bytes=sizes["flash"] // 4)
    with pytest.raises(ConfigError, match="representatives=memory"):
        DynaKV(update="local", layout="tokens", representatives="flash")
    with pytest.raises(ConfigError, match="auto, memory, flash"):
        DynaKV(representatives="disk")


def test_a_failed_read_is_told_and_a_crop_cures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, script = make("flash"), Script()
    for tokens in (90, *[1] * 5):
        script.run([runtime], tokens)
    plain = RepresentativeFile.submit_read

    def fails(self: RepresentativeFile, counts: Any) -> Any:
        raise FetchError("the disk is gone")

    monkeypatch.setattr(RepresentativeFile, "submit_read", fails)
    with pytest.raises(FetchError, match="the disk is gone"):
        script.run([runtime], 1)
    monkeypatch.setattr(RepresentativeFile, "submit_read", plain)
    runtime.crop(90)
    for _ in range(10):
        script.run([runtime], 1)
    runtime.close()


def test_a_file_gives_back_what_was_written() -> None:
    """Neighbours in a sector, of one row or of two, survive; unused places may hold anything."""
    generator = np.random.default_rng(0)
    rows, capacity, dim = 3, 11, 6
    buffer = RepresentativeBuffer(rows, capacity, dim, 512)
    file = RepresentativeFile(MemoryFile(), buffer)
    wanted = generator.normal(size=(rows, capacity, dim)).astype(np.float32)
    counts = np.array([11, 4, 7])
    buffer.vectors[:] = wanted
    file.write_all(counts)
    for _ in range(25):
        buffer.memory.array.fill(255)
        file.submit_read(counts).wait()
        for row, count in enumerate(counts):
            np.testing.assert_array_equal(buffer.vectors[row, :count], wanted[row, :count])
        changed = []
        for row in range(rows):
            counts[row] = min(capacity, counts[row] + generator.integers(0, 2))
            cluster = int(generator.integers(0, counts[row]))
            for number in {cluster, int(counts[row]) - 1}:
                wanted[row, number] = buffer.vectors[row, number] = generator.normal(size=dim)
                changed.append(row * capacity + number)
        written = file.write(np.array(sorted(changed)))
        assert 1 <= written.writes <= len(changed)
        assert written.num_bytes % 512 == 0
