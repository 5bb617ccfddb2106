"""The device tier does what the engine that the host drives does, and keeps its books in order."""

import contextlib
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import KVSwap, Quest, SelectionPolicy
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.louiskv.device_index import DeviceSemanticUnits
from penstock.methods.louiskv.policy import LouisKV

SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where there is a GPU the fast kernels and pinned memory are tested, else their meaning."""
LENDS = DEVICE.type == "cpu"
"""Whether slots lend a prompt their memory; a GPU's attention in float32 keeps logits there."""
SCALING, PROMPT_TOKENS, STEPS, MAX_TOKENS = 0.25, 150, 14, 400
BUDGET: dict[str, Any] = {"selected_tokens": 24, "window_tokens": 8, "sink_tokens": 4}

POLICIES: dict[str, SelectionPolicy] = {
    "quest": Quest(group_tokens=8, **BUDGET),
    "quest-reuse": Quest(group_tokens=8, reuse_tokens=56, **BUDGET),
    "arkvale": ArkVale(group_tokens=4, reuse_tokens=40, **BUDGET),
    "kvswap": KVSwap(reuse_tokens=48, rank=8, predict=False, **BUDGET),
    "kvswap-keep": KVSwap(keep=2.0, rank=8, **{**BUDGET, "selected_tokens": 48}),
    "kvswap-shared": KVSwap(reuse_tokens=0, rank=8, predict=False, **BUDGET),
    "kvswap-8-bits": KVSwap(reuse_tokens=48, rank=8, predict=False, slot_bits=8, **BUDGET),
    "kvswap-shared-8-bits": KVSwap(
        reuse_tokens=0, rank=8, predict=False, slot_bits=8, **BUDGET
    ),
    "louiskv": LouisKV(tau=0.5, cluster_tokens=8, block_tokens=PROMPT_TOKENS, **BUDGET),
    "louiskv-spread": LouisKV(
        tau=0.5, cluster_tokens=8, block_tokens=PROMPT_TOKENS, summary="mean+spread", **BUDGET
    ),
    "louiskv-stride": LouisKV(
        boundaries="stride:3", cluster_tokens=8, block_tokens=PROMPT_TOKENS, **BUDGET
    ),
}  # fmt: skip


def make_runtime(policy: SelectionPolicy, batch: int = 2, **changes: Any) -> TieredRuntime:
    options: dict[str, Any] = {
        "shape": SHAPE, "policy": policy, "limit_bytes": None, "store": "memory",
        "max_tokens": MAX_TOKENS, "exact": False, "adapter": None, "device": DEVICE,
    }  # fmt: skip
    return TieredRuntime(RuntimeSettings(**{**options, **changes}), batch)


def require_host_engine(policy: SelectionPolicy) -> None:
    """Skip where slots in 8 bits are for the device tier alone."""
    if getattr(policy, "slot_bits", None) == 8 and DEVICE.type != "cpu":
        pytest.skip("the other engine has no slots in 8 bits on a GPU")


class Feed:
    """The same random tokens for any number of runtimes; queries turn slowly."""

    def __init__(self, *runtimes: TieredRuntime, padding: tuple[int, ...] = (0, 13)) -> None:
        self.runtimes = runtimes
        self.padding = torch.tensor(padding)
        self.random = torch.Generator().manual_seed(3)
        self.length = 0
        self.query = self.randn(len(padding), 4, 1, SHAPE.head_dim)

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random).to(DEVICE)

    def step(self, count: int = 1) -> list[list[Tensor]]:
        """What each runtime's layers answered: [rows, tokens, heads, head_dim] by layer."""
        batch = len(self.padding)
        self.length += count
        visible = torch.arange(self.length) >= self.padding[:, None]
        shown = None if bool(visible.all()) else visible.to(DEVICE)
        out: list[list[Tensor]] = [[] for _ in self.runtimes]
        for layer in range(SHAPE.num_layers):
            # Two thirds of the last query: some steps are boundaries, some are not.
            self.query = 0.7 * self.query + 0.7 * self.randn(batch, 4, 1, SHAPE.head_dim)
            query = self.query if count == 1 else self.randn(batch, 4, count, SHAPE.head_dim)
            keys, values = (self.randn(batch, 2, count, SHAPE.head_dim) for _ in range(2))
            call = AttentionCall(3 * query, keys, values, SCALING, visible=shown)
            for runtime, answers in zip(self.runtimes, out, strict=True):
                answers.append(runtime.attend(layer, call))
        return out


def decode_counters(runtime: TieredRuntime) -> tuple[int, ...]:
    runtime.end_step()
    if runtime.device_steps is not None:
        runtime.device_steps.count_into(runtime.stats.decode)
    decode = runtime.stats.decode
    return decode.steps, decode.units_wanted, decode.units_hit


@pytest.mark.parametrize("name", POLICIES)
def test_the_engines_agree(name: str) -> None:
    """Same tokens, same selections, same bytes, whoever drives the decode."""
    policy = POLICIES[name]
    require_host_engine(policy)
    runtimes = [make_runtime(policy), make_runtime(policy, device_tier=True)]
    try:
        feed = Feed(*runtimes)
        feed.step(PROMPT_TOKENS)
        for runtime in runtimes:
            decode_counters(runtime)
        for step in range(STEPS):
            for host, device in zip(*feed.step(), strict=True):
                assert (host - device).abs().max().item() < 5e-5, step
        host_counts, device_counts = map(decode_counters, runtimes)
        assert host_counts[0] == STEPS
        reuses = not runtimes[1].plan.shared_pools
        assert host_counts[1] > host_counts[2] >= reuses
        assert device_counts == host_counts
    finally:
        for runtime in runtimes:
            runtime.close()


@pytest.mark.parametrize(
    "policy",
    [
        *(POLICIES[name] for name in ("quest", "arkvale", "kvswap", "kvswap-shared")),
        KVSwap(reuse_tokens=96, rank=8, predict=False, slot_bits=8, **BUDGET),
    ],
)
def test_prompts_stream_through_the_slots(policy: SelectionPolicy) -> None:
    """What slots and windows held before a prompt, and what it left in them, changes nothing."""
    require_host_engine(policy)
    with (
        contextlib.closing(make_runtime(policy)) as host,
        contextlib.closing(make_runtime(policy, device_tier=True)) as device,
    ):
        feed = Feed(host, device, padding=(0, 0))
        for count in (64, 70, 1, 1, 1, 65, 1, 1, 66, 71, 1, 1, 1):
            for wanted, found in zip(*feed.step(count), strict=True):
                assert (wanted - found).abs().max().item() < 5e-5, feed.length
            if count > 1:  # where slots lend nothing, what they hold is attended to further on
                for each in (*host.layers, *(() if LENDS else device.layers)):
                    each.forget_slots()
        layer = device.layers[0]
        assert isinstance(layer, DeviceLayer)
        # By two layers, in each pass with a past.
        assert layer.setup.workspace.times_lent == (8 if LENDS else 0)


def test_a_closed_runtime_holds_no_memory() -> None:
    """Not even until the garbage collector comes: a GPU's memory is wanted at once."""
    runtime = make_runtime(POLICIES["kvswap"], device_tier=True)
    feed = Feed(runtime)
    feed.step(PROMPT_TOKENS)
    feed.step()
    layer = runtime.layers[0]
    assert isinstance(layer, DeviceLayer)
    parts = [weakref.ref(each) for each in (layer, layer.pool, layer.host.units)]
    del layer
    gc.disable()
    try:
        runtime.close()
        assert [part() for part in parts] == [None] * 3
        assert runtime.stats.decode.units_wanted == 2 * 2 * 6  # layers, rows, groups
    finally:
        gc.enable()


def test_shared_pools_after_a_crop_and_rows_that_change_places() -> None:
    """Windows are beside the pools, and come back into them."""
    policy = POLICIES["kvswap-shared"]
    feed = Feed(make_runtime(policy), make_runtime(policy, device_tier=True), padding=(0, 0))
    assert feed.runtimes[1].plan.shared_pools
    feed.step(PROMPT_TOKENS)
    for change in (None, "crop", "rows"):
        for runtime in feed.runtimes:
            if change == "crop":
                runtime.crop(feed.length - 9)
            elif change == "rows":
                runtime.select_rows(torch.tensor([1, 1]))
        feed.length -= 9 * (change == "crop")
        for _ in range(3):
            for host, device in zip(*feed.step(), strict=True):
                assert (host - device).abs().max().item() < 5e-5, change
            for runtime in feed.runtimes:
                runtime.end_step()
    for runtime in feed.runtimes:
        runtime.close()


def test_the_selection_matters() -> None:
    """Another budget gives other outputs: what agrees above is not attention to everything."""
    runtimes = [
        make_runtime(LouisKV(tau=0.5, cluster_tokens=8, **{**BUDGET, "selected_tokens": tokens}),
                     device_tier=True)
        for tokens in (24, 32)
    ]  # fmt: skip
    feed = Feed(*runtimes)
    feed.step(PROMPT_TOKENS)
    first, second = feed.step()
    assert (first[0] - second[0]).abs().max().item() > 1e-3


def selectable(index: DeviceSemanticUnits, row: int) -> list[int]:
    """Positions in all units of a row, as they may be taken."""
    state, found = index.state, []
    for unit in range(int(state.count[row])):
        first, size = int(state.first[row, unit]), int(state.sizes[row, unit])
        found += index.members[row, first : first + size].tolist()
    return found


def check_books(runtime: TieredRuntime, feed: Feed) -> None:
    """Every token behind the window is in one unit, and sinks and padding are in none."""
    for layer in runtime.layers:
        assert isinstance(layer, DeviceLayer)
        assert isinstance(layer.index, DeviceSemanticUnits)
        for row in range(runtime.plan.batch):
            start = int(feed.padding[row // SHAPE.num_kv_heads]) + 4
            end = feed.length - runtime.plan.window_slots
            assert sorted(selectable(layer.index, row)) == list(range(start, end))
            resident = [unit for unit in layer.unit_in[row].tolist() if unit >= 0]
            assert len(set(resident)) == len(resident)
            assert all(layer.unit_in[row, layer.slot_of[row, unit]] == unit for unit in resident)


def index_of(runtime: TieredRuntime) -> DeviceSemanticUnits:
    layer = runtime.layers[0]
    assert isinstance(layer, DeviceLayer)
    assert isinstance(layer.index, DeviceSemanticUnits)
    return layer.index


def test_a_long_answer_merges_segments_and_loses_nothing() -> None:
    policy = LouisKV(boundaries="stride:1", cluster_tokens=8, **BUDGET)
    runtime = make_runtime(policy, device_tier=True, max_tokens=105)
    feed = Feed(runtime)
    feed.step(40)
    most = 0
    for step in range(60):
        feed.step()
        count = int(index_of(runtime).state.count.max())
        assert count <= index_of(runtime).means.shape[1]
        if step % 20 == 3:
            check_books(runtime, feed)
        most = max(most, count)
    assert int(index_of(runtime).counters[0, 0]) == 60
    assert most > int(index_of(runtime).state.count.max()), "segments were merged"


def test_means_of_merged_segments_are_those_of_their_tokens() -> None:
    policy = LouisKV(boundaries="stride:1", cluster_tokens=8, **BUDGET)
    runtime = make_runtime(policy, batch=1, device_tier=True, max_tokens=110)
    feed = Feed(runtime, padding=(0,))
    feed.step(40)
    for _ in range(60):
        feed.step()
    index, layer = index_of(runtime), runtime.layers[0]
    assert int(index.state.count.max()) < 60, "segments were merged"
    assert isinstance(layer, DeviceLayer)
    for row in range(2):
        keys = layer.host.tokens[row, : feed.length, 0, 0].to(DEVICE)
        units = index.unit_of[row, : feed.length].long()
        for unit in range(int(index.state.count[row])):
            held = keys[units == unit]
            assert len(held) > 0
            # Clusters of k-means have the centroids of the iteration before the last assignment.
            if unit >= index._runs.first:
                assert (held.mean(dim=0) - index.means[row, unit]).abs().max().item() < 1e-4


def check_segments(runtime: TieredRuntime, feed: Feed) -> None:
    """Segments of all answers hold consecutive tokens, and their means are those of these."""
    index, layer = index_of(runtime), runtime.layers[0]
    assert isinstance(layer, DeviceLayer)
    runs = [*index._runs._closed, (index._runs.first, int(index.state.count.max()))]
    for row in range(runtime.plan.batch):
        keys = layer.host.tokens[row, : feed.length, 0, 0].to(DEVICE)
        units = index.unit_of[row, : feed.length].long()
        for unit in (unit for run in runs for unit in range(*run)):
            held = (units == unit).nonzero()[:, 0]
            if len(held):
                assert held.tolist() == list(range(int(held[0]), int(held[-1]) + 1))
                mean = keys[held].mean(dim=0)
                assert (mean - index.means[row, unit]).abs().max().item() < 1e-4


def test_many_turns_merge_the_segments_of_all_answers() -> None:
    policy = LouisKV(boundaries="stride:2", cluster_tokens=16, **BUDGET)
    runtime = make_runtime(policy, device_tier=True, max_tokens=240)
    feed = Feed(runtime)
    while feed.length < 210:
        feed.step(40)
        for _ in range(30):
            feed.step()
        check_books(runtime, feed)
        check_segments(runtime, feed)
    index, answers = index_of(runtime), feed.length // 70
    assert len(index._runs._closed) == answers - 1
    assert int(index.state.count.max()) < answers * 30 // 2, "segments were merged"


@pytest.mark.parametrize("tokens", [2, 17])
def test_inputs_of_few_tokens_do_not_use_up_the_units(tokens: int) -> None:
    """As a draft's tokens come, a few at a time, of which some are taken back."""
    runtime = make_runtime(LouisKV(cluster_tokens=16, **BUDGET), device_tier=True, max_tokens=130)
    feed = Feed(runtime)
    feed.step(40)
    while feed.length < 120 - tokens:
        feed.step(tokens)
        feed.length -= tokens // 4
        runtime.crop(feed.length)
    feed.step()
    check_books(runtime, feed)


def test_a_second_prompt_and_a_crop_keep_the_books() -> None:
    policy = LouisKV(tau=0.7, cluster_tokens=8, **BUDGET)
    runtime = make_runtime(policy, device_tier=True)
    feed = Feed(runtime)
    feed.step(PROMPT_TOKENS)
    for _ in range(15):
        feed.step()
    feed.step(50)
    for _ in range(10):
        feed.step()
    check_books(runtime, feed)
    for length in (200, 90):
        runtime.crop(length)
        feed.length = length
        for _ in range(6):
            feed.step()
        check_books(runtime, feed)


def test_nothing_in_a_step_asks_the_device() -> None:
    """The tensors of a step never change their place, so that a recorded step stays true."""
    runtime = make_runtime(POLICIES["louiskv"], device_tier=True)
    feed = Feed(runtime)
    feed.step(PROMPT_TOKENS)
    feed.step()

    def places() -> list[int]:
        found = []
        for layer in runtime.layers:
            assert isinstance(layer, DeviceLayer)
            assert isinstance(layer.index, DeviceSemanticUnits)
            tensors = [
                layer.unit_in, layer.slot_of, layer.pool.memory, layer.pool.mask,
                layer.lists.units, layer.index.means, layer.index.members, layer.index.unit_of,
                layer.index.state.count, layer.index._wanted.ids, layer.setup.clock.position,
            ]  # fmt: skip
            found += [tensor.data_ptr() for tensor in tensors]
        return found

    before = places()
    for _ in range(40):
        feed.step()
    assert places() == before


SPREAD = LouisKV(tau=0.7, cluster_tokens=8, summary="mean+spread", **BUDGET)


def spread_error(runtime: TieredRuntime, feed: Feed) -> float:
    """The largest error of a unit's spread, in its keys' mean squared length; all units."""
    index, layer, worst = index_of(runtime), runtime.layers[0], 0.0
    assert isinstance(layer, DeviceLayer)
    assert index.spread is not None
    for row in range(runtime.plan.batch):
        keys = layer.host.tokens[row, : feed.length, 0, 0].to(DEVICE).float()
        units = index.unit_of[row, : feed.length].long()
        for unit in range(int(index.state.count[row])):
            held = keys[units == unit]
            # Of centroids that were not quite done, distances to them count.
            apart = (held - index.means[row, unit].float()).square().sum(dim=1).mean()
            half = apart / (2 * keys.shape[1])
            wrong = (index.spread.halves[row, unit] - half).abs()
            worst = max(worst, float(wrong / held.square().sum(dim=1).mean()))
    return worst


def test_clusters_and_segments_have_the_spread_of_their_keys() -> None:
    runtime = make_runtime(SPREAD, device_tier=True)
    feed = Feed(runtime)
    feed.step(150)
    assert spread_error(runtime, feed) < 1e-5
    for _ in range(15):
        feed.step()
    feed.step(50)
    for _ in range(10):
        feed.step()
    assert spread_error(runtime, feed) < 1e-5


def test_merged_segments_have_that_of_all_their_keys() -> None:
    policy = replace(SPREAD, boundaries="stride:1")
    runtime = make_runtime(policy, batch=1, device_tier=True, max_tokens=110)
    feed = Feed(runtime, padding=(0,))
    feed.step(40)
    began = int(index_of(runtime).state.count.max())
    for _ in range(60):
        feed.step()
    assert int(index_of(runtime).state.count.max()) - began < 49, "segments were merged"
    assert spread_error(runtime, feed) < 1e-5
    halves = index_of(runtime)
    assert halves.spread is not None
    assert float(halves.spread.halves[:, began : began + 4].min()) > 0.1, "of several keys each"


def test_rows_change_places_with_their_spread() -> None:
    runtime = make_runtime(SPREAD, device_tier=True)
    feed = Feed(runtime)
    feed.step(90)
    for _ in range(9):
        feed.step()
    index, order = index_of(runtime), torch.tensor([2, 3, 0, 1], device=DEVICE)
    assert index.spread is not None
    halves, squares = index.spread.halves.clone(), index.spread.open_square.clone()
    index.take_rows_from(index, order)
    assert not torch.equal(index.spread.halves, halves)
    assert torch.equal(index.spread.halves, halves[order])
    assert torch.equal(index.spread.open_square, squares[order])
