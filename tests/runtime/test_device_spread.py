"""Units of the device tier with their spread: through prompts, answers, merges and crops."""

from dataclasses import replace

import torch

from penstock.policies.louiskv import LouisKV
from penstock.runtime.device_tier.device_layer import DeviceLayer
from penstock.runtime.tiered_runtime import TieredRuntime
from tests.runtime.test_device_tier import BUDGET, DEVICE, Feed, index_of, make_runtime

SPREAD = LouisKV(tau=0.7, cluster_tokens=8, summary="mean+spread", **BUDGET)


def error(runtime: TieredRuntime, feed: Feed) -> float:
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
    assert error(runtime, feed) < 1e-5
    for _ in range(30):
        feed.step()
    feed.step(50)
    for _ in range(20):
        feed.step()
    assert error(runtime, feed) < 1e-5


def test_merged_segments_have_that_of_all_their_keys() -> None:
    runtime = make_runtime(replace(SPREAD, boundaries="stride:1"), batch=1, device_tier=True)
    feed = Feed(runtime, padding=(0,))
    feed.step(40)
    began = int(index_of(runtime).state.count.max())
    for _ in range(300):
        feed.step()
    assert int(index_of(runtime).state.count.max()) - began < 250, "segments were merged"
    assert error(runtime, feed) < 1e-5
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
