"""LouisKV's units with their spread: what it is worth, and that it is that of the unit's keys."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.policy import IndexRequest
from penstock.kernels import unit_selection
from penstock.kernels.unit_selection import unit_scores
from penstock.methods.louiskv.index import SemanticUnitsIndex
from penstock.methods.louiskv.policy import LouisKV
from penstock.methods.louiskv.unit_pool import UnitPool

DIM, ROWS = 8, 4


def test_a_unit_weighs_what_normally_distributed_keys_are_attended_to_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(1, 3, DIM, generator=generator)
    deviations = torch.tensor([0.1, 0.5, 0.9])
    keys = torch.randn(200_000, 3, DIM, generator=generator) * deviations[:, None] + means[0]
    query = torch.randn(1, 2, DIM, generator=generator)
    scaling = 0.5
    # [heads, units]: the mean of exp(logit) over a unit's keys.
    weights = torch.exp(scaling * torch.einsum("hd,nud->hnu", query[0], keys)).mean(dim=1)
    expected = (weights / weights.sum(dim=1, keepdim=True)).mean(dim=0)
    squares = keys.square().sum(dim=2).mean(dim=0)[None]
    sizes = torch.tensor([[5, 1, 2]])
    scores = unit_scores(query, means, sizes, scaling, squares=squares)
    torch.testing.assert_close(scores[0], expected, atol=0.01, rtol=0.02)
    plain = unit_scores(query, means, sizes, scaling)
    assert (plain[0] - expected).abs().max() > 0.05, "mean keys alone do not say it"


def test_chunks_rows_and_empty_units(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(3, 50, DIM, generator=generator)
    squares = means.square().sum(2) + torch.rand(3, 50, generator=generator)
    query = torch.randn(3, 2, DIM, generator=generator)
    sizes = torch.randint(0, 3, (3, 41), generator=generator)
    spread = (squares - means.square().sum(2))[:, :41] / DIM
    logits = 0.3 * query @ means[:, :41].transpose(1, 2)
    logits = logits + 0.5 * 0.09 * query.square().sum(2, keepdim=True) * spread[:, None]
    logits = logits.masked_fill((sizes == 0)[:, None], -math.inf)
    expected = logits.softmax(-1).mean(1).masked_fill(sizes == 0, -1.0)
    monkeypatch.setattr(unit_selection, "CHUNK_UNITS", 16)
    found = unit_scores(query, means, sizes, 0.3, squares=squares)
    torch.testing.assert_close(found, expected)
    which = torch.tensor([2, 0])
    some = unit_scores(query[which], means, sizes[which], 0.3, which, squares=squares)
    torch.testing.assert_close(some, expected[which])


def test_squares_below_the_mean_key_s_own_count_as_no_spread() -> None:
    """Rounding to 16 bits can do that; the same scores as mean keys come of it."""
    generator = torch.Generator().manual_seed(2)
    means = torch.randn(1, 6, DIM, generator=generator)
    query, sizes = torch.randn(1, 1, DIM, generator=generator), torch.ones(1, 6, dtype=torch.int64)
    lower = means.square().sum(2) - 0.5
    same = unit_scores(query, means, sizes, 1.0, squares=lower)
    torch.testing.assert_close(same, unit_scores(query, means, sizes, 1.0))


# The pool ---------------------------------------------------------------------------------------


class Life:
    """An index of two sequences, with every key it was given."""

    def __init__(self, beside: bool, room: int = 512) -> None:
        shape = KVShape(
            num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=DIM, dtype=torch.float32
        )
        policy = LouisKV(
            summary="mean+spread", cluster_tokens=4, block_tokens=64, beside=beside, tau=0.5,
            window_tokens=0, sink_tokens=0,
        )  # fmt: skip
        index = policy.make_index(IndexRequest(
            shape=shape, batch=ROWS, max_units=room, group_tokens=1, scaling=0.3, adapter=None,
            device=torch.device("cpu"), score_tokens=0, selected_units=0, rows_per_sequence=2,
        ))  # fmt: skip
        assert isinstance(index, SemanticUnitsIndex)
        self.index, self.keys = index, torch.zeros(ROWS, 0, DIM)
        self.draw = torch.Generator().manual_seed(3)
        self.first = np.zeros(ROWS, dtype=np.int64)

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def prompt(self, tokens: int) -> None:
        keys = torch.randn(ROWS, tokens, DIM, generator=self.draw)
        if not self.index.ready:
            self.index.fit(keys[:, None], torch.zeros(1))
        self._take(keys)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            query = torch.randn(ROWS, 2, DIM, generator=self.draw)
            self.index.begin_step(query, self.first, self.length)
            self.index.retrieve(query, self.first, self.length, 10)
            self._take(torch.randn(ROWS, 1, DIM, generator=self.draw))

    def _take(self, keys: Tensor) -> None:
        self.index.append(keys[:, :, None], self.length)
        self.keys = torch.cat([self.keys, keys], dim=1)

    def errors(self) -> tuple[float, float]:
        """The largest errors of means and of squares; the squares' is relative."""
        pool: UnitPool = self.index._pool
        places, sizes = pool.units(self.first, self.length)
        assert pool.squares is not None
        worst = [0.0, 0.0]
        for row in range(ROWS):
            for unit, (place, size) in enumerate(zip(places[row], sizes[row], strict=True)):
                if not size:
                    continue
                held = self.keys[row, pool.members[row, place : place + size].long()]
                mean, square = held.mean(0), held.square().sum(1).mean()
                found = pool.squares[row, unit] - pool.means[row, unit].square().sum()
                spread = square - mean.square().sum()
                worst[0] = max(worst[0], float((pool.means[row, unit] - mean).abs().max()))
                worst[1] = max(worst[1], float((found - spread).abs() / (1 + square)))
        return worst[0], worst[1]


@pytest.mark.parametrize("beside", [True, False])
def test_squares_are_those_of_the_units_keys(beside: bool) -> None:
    life = Life(beside)
    for prompt, steps in ((150, 40), (3, 25)):
        life.prompt(prompt)
        life.decode(steps)
        means, squares = life.errors()
        assert squares < 0.02, "of centroids that were not quite done, distances count"
        assert means < 0.3


def test_merged_and_swapped_units_keep_their_squares() -> None:
    """A pool that is full of short segments merges them; then the sequences change places."""
    life = Life(beside=True, room=96)
    life.prompt(8)
    life.decode(80)
    pool = life.index._pool
    lengths = pool._segments.ends - pool._segments.starts
    assert (lengths[:, 0] >= 4).all(), "every step began one; the oldest were merged"
    means, squares = life.errors()
    assert squares < 1e-3
    assert means < 1e-3
    swapped = torch.tensor([2, 3, 0, 1])
    life.index.take_rows_from(life.index, swapped)
    life.keys = life.keys[swapped]
    assert max(life.errors()) < 1e-3
    life.decode(10)
    assert max(life.errors()) < 1e-3


def test_a_segment_that_is_cut_short_goes_on_from_what_it_was() -> None:
    life = Life(beside=True)
    life.prompt(8)
    life.decode(6)
    pool: Any = life.index._pool
    life.index.begin_step(torch.zeros(ROWS, 2, DIM), life.first, life.length - 2)
    at, tokens = pool._open_segments()
    rows, columns = torch.arange(ROWS), pool._spread(pool._clusters.used + at)
    expected = pool.squares[rows, columns] * pool._spread(tokens)
    torch.testing.assert_close(pool._open_squares, expected)


@pytest.mark.parametrize("device_tier", [False, True])
def test_it_costs_one_number_a_unit(device_tier: bool) -> None:
    shape = KVShape(
        num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16
    )
    request = SizingRequest(
        shape=shape, batch=3, max_tokens=4096, limit_bytes=None, sector_bytes=512,
        device_is_cpu=False, has_adapter=False, rows_per_sequence=1, device_tier=device_tier,
    )  # fmt: skip
    held = [
        LouisKV(
            summary=summary, selected_tokens=64, cluster_tokens=4, block_tokens=512, beside=True
        ).index_sizes(request)[0][1].index_bytes
        for summary in ("mean", "mean+spread")
    ]  # fmt: skip
    more = (held[1] - held[0]) / 3
    assert 4 * 4096 / 4 < more < 3 * 4 * 4096 / 4, "units that there is room for, and little else"
