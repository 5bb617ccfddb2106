"""LouisKV's index: by hand, boundaries per sequence, reuse, threads, crops and merging."""

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.policy import IndexRequest
from penstock.methods.louiskv.block_clusterer import BlockClusterer, num_clusters
from penstock.methods.louiskv.index import SemanticUnitsIndex
from penstock.methods.louiskv.policy import SUMMARIES, LouisKV

SHAPE = KVShape(
    num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=2, dtype=torch.float32
)  # fmt: skip
EAST, NORTH, WEST = (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)
LN2, LN4 = math.log(2), math.log(4)
TO_NORTH = ((LN2, 0.0), (0.0, LN4))
"""Weighs east, north and west 2 : 1 : 1/2 with one head and 1 : 4 : 1 with the other."""
TO_WEST = ((-LN4, 0.0), (0.0, LN4))


class Step:
    """One layer's index, driven as the engine drives it; the window is two tokens."""

    def __init__(self, policy: LouisKV, *, rows: int = 1, sequences: int = 1, room: int = 64):
        self.policy = policy
        request = IndexRequest(
            shape=SHAPE, batch=rows, max_units=room, group_tokens=1, scaling=1.0, adapter=None,
            device=torch.device("cpu"), score_tokens=0, selected_units=0,
            rows_per_sequence=rows // sequences,
        )  # fmt: skip
        index = policy.make_index(request)
        assert isinstance(index, SemanticUnitsIndex)
        self.index, self.rows, self.length = index, rows, 0

    def prompt(self, keys: Tensor) -> None:
        self.index.append(keys.unsqueeze(2), self.length)
        self.length += keys.shape[1]

    def decode(self, query: Tensor, key: tuple[float, float], wanted: int) -> Selection:
        end = self.length + 1 - 2
        first = np.zeros(self.rows, dtype=np.int64)
        self.index.begin_step(query, first, self.length)
        chosen = self.policy.select(self.index, query, first, end, wanted)
        self.prompt(torch.tensor(key).expand(self.rows, 1, 2))
        return chosen


def made(**options: Any) -> LouisKV:
    base: dict[str, Any] = {"tau": 0.7, "cluster_tokens": 4, "block_tokens": 64, "beside": True}
    return LouisKV(window_tokens=1, sink_tokens=0, **{**base, **options})


def test_by_hand() -> None:
    """Twelve prompt tokens, east and north in turn, are two clusters; then the answer goes west.

    Scores to the north: north 40/84, east 31/84, west 13/84 (see tests/kernels): a budget of eight
    is the six tokens of north, the odd ones, and the first two of east.
    """
    step = Step(made())
    step.prompt(torch.tensor([EAST, NORTH] * 6).unsqueeze(0))
    north, west = torch.tensor([TO_NORTH]), torch.tensor([TO_WEST])
    # The first step retrieves. Token 11 is in the window still, so that north has five, east three.
    assert step.decode(north, WEST, 8).unit_ids.tolist() == [[0, 1, 2, 3, 4, 5, 7, 9]]
    # The same query: what was retrieved is reused as it is, though token 11 has left the window.
    for _ in range(2):
        assert step.decode(1.5 * north, WEST, 8).unit_ids.tolist() == [[0, 1, 2, 3, 4, 5, 7, 9]]
    # Cosines -1 and 1, mean 0 < 0.7: a boundary, so tokens 12, 13 and 14 are a segment, which now
    # ends one token before the window: 12 and 13. Weights of east, north, west to the west:
    # 1/4 : 1 : 4 and 1 : 4 : 1, so west (16/21 + 1/6) / 2 comes before north (4/21 + 4/6) / 2.
    chosen = step.decode(west, NORTH, 8)
    assert chosen.unit_ids.tolist() == [[1, 3, 5, 7, 9, 11, 12, 13]]
    assert chosen.valid is None
    counters = step.index.counters
    assert (counters.retrievals, counters.reuse_steps) == ((2,), (2,))
    assert counters.segment_tokens == {1: 1, 3: 1}


def test_each_sequence_has_boundaries_of_its_own() -> None:
    """Two KV heads each: the mean of all heads of a sequence decides for both of its rows."""
    step = Step(made(tau=0.4), rows=4, sequences=2)
    torch.manual_seed(0)
    step.prompt(torch.randn(4, 40, 2))
    query = torch.tensor([[EAST, EAST], [NORTH, NORTH], [EAST, EAST], [EAST, EAST]])
    before = step.decode(query, NORTH, 6).unit_ids.copy()
    turned = query.clone()
    turned[1] = -turned[1]  # mean of the first sequence: 0; the second stays as it was
    turned[2, 0] = torch.tensor(NORTH)  # 3/4 of its heads: above tau
    after = step.decode(turned, NORTH, 6).unit_ids
    assert step.index.boundaries.boundaries.tolist() == [2, 1]
    assert (after[2:] == before[2:]).all()
    assert (after[1] != before[1]).any()
    assert step.index.counters.reuse_steps == (0, 1)


def test_between_boundaries_nothing_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(made())
    step.prompt(torch.randn(1, 40, 2))
    query = torch.tensor([TO_NORTH])
    kept = step.decode(query, EAST, 6)
    assert kept.reused is not None
    assert not kept.reused.any()

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("scored between boundaries")

    monkeypatch.setattr("penstock.methods.louiskv.index.unit_scores", refuse)
    for _ in range(5):
        again = step.decode(query, EAST, 6)
        assert again.unit_ids is kept.unit_ids
        assert again.reused is not None
        assert again.reused.all()
    with pytest.raises(AssertionError, match="scored"):
        step.decode(-query, EAST, 6)


@pytest.mark.parametrize(
    ("boundaries", "expected"), [("stride:3", 4), ("every", 10), ("adaptive", 1)]
)
def test_how_often_a_layer_retrieves(boundaries: str, expected: int) -> None:
    """Ten steps with one query: it is only the first that is a boundary by tau."""
    step = Step(made(boundaries=boundaries))
    step.prompt(torch.randn(1, 40, 2))
    for _ in range(10):
        step.decode(torch.tensor([TO_NORTH]), EAST, 6)
    assert step.index.counters.retrievals == (expected,)


def test_pages_hold_consecutive_tokens() -> None:
    step = Step(made(units="pages"))
    step.prompt(torch.tensor([EAST] * 4 + [NORTH] * 4 + [EAST] * 4 + [WEST] * 4).unsqueeze(0))
    chosen = step.decode(torch.tensor([TO_NORTH]), EAST, 4)
    assert chosen.unit_ids.tolist() == [[4, 5, 6, 7]]


def test_a_block_on_a_thread_is_clustered_as_in_the_open() -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 64, 2)
    step = Step(made(block_tokens=16), rows=3, room=80)
    step.prompt(keys[:, :5])
    step.prompt(keys[:, 5:])
    step.index._finish_prompt()
    alone = BlockClusterer(
        keys, rows=3, block_tokens=16, cluster_tokens=4, cosine=False, elements=1 << 13
    )
    for i in range(4):
        expected = alone.cluster(keys[:, 16 * i : 16 * (i + 1)])
        assert torch.equal(step.index._pool.means[:, 4 * i : 4 * (i + 1)], expected.means)
    # Every mean is the mean of its tokens.
    check_means(step.index, keys)


def check_means(index: SemanticUnitsIndex, keys: Tensor, tolerance: float = 1e-5) -> None:
    """Every unit's index vector against the tokens that it says it holds."""
    rows, end = keys.shape[:2]
    places, sizes = index._pool.units(np.zeros(rows, dtype=np.int64), end)
    for row in range(rows):
        for unit, (place, size) in enumerate(zip(places[row], sizes[row], strict=True)):
            if size:
                tokens = index._pool.members[row, place : place + size].long()
                mean = keys[row, tokens].mean(dim=0)
                assert (index._pool.means[row, unit] - mean).abs().max() < tolerance, (row, unit)


def test_a_thread_that_fails_is_an_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no clusters today")

    monkeypatch.setattr("penstock.methods.louiskv.block_clusterer.kmeans", fail)
    step = Step(made(block_tokens=16))
    step.prompt(torch.randn(1, 20, 2))
    for _ in range(2):  # the block stays lost: its tokens belong to no unit
        with pytest.raises(ValueError, match="no clusters today"):
            step.decode(torch.tensor([TO_NORTH]), EAST, 6)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no clusters today"):
        step.index.append(torch.randn(1, 1, 1, 2), 18)
    step.length = 0
    step.prompt(torch.randn(1, 20, 2))
    assert step.decode(torch.tensor([TO_NORTH]), EAST, 6).unit_ids.shape == (1, 6)


def test_close_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says nothing of what failed there: nobody will read it."""
    ended = []

    def slowly(points: Tensor, clusters: int, **kwargs: Any) -> Any:
        time.sleep(0.2)
        ended.append(clusters)
        raise ValueError("no clusters today")

    monkeypatch.setattr("penstock.methods.louiskv.block_clusterer.kmeans", slowly)
    step = Step(made(block_tokens=16))
    step.prompt(torch.randn(1, 20, 2))
    step.index.close()
    assert ended == [4]


def test_neighbours_are_merged_when_the_pool_is_full() -> None:
    """A boundary at every step: many more segments than there is room for."""
    step = Step(made(tau=1.01), room=120)
    step.prompt(torch.randn(1, 20, 2))
    keys = [torch.zeros(20, 2)]
    for i in range(90):
        key = (math.cos(i), math.sin(i))
        step.decode(torch.tensor([TO_NORTH]), key, 6)
        keys.append(torch.tensor([key]))
    table = step.index._pool._segments
    assert step.index._pool.num_units <= step.index._pool.means.shape[1] < 90
    starts, ends = table.starts[0, : table.columns], table.ends[0, : table.columns]
    assert starts[0] == 20
    assert ends[-1] == 110
    assert (starts[1:] == ends[:-1]).all()
    assert step.index.counters.segment_tokens == {1: 90}
    # Two appended tokens at most are newer than the last means that were written.
    step.index._pool.units(np.zeros(1, dtype=np.int64), 110)
    whole = torch.cat(keys)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        unit = step.index._pool._clusters.used + i
        expected = whole[start:end].mean(dim=0)
        assert (step.index._pool.means[0, unit] - expected).abs().max() < 1e-5


def test_crops_leave_means_of_what_is_left_to_segments() -> None:
    torch.manual_seed(0)
    step = Step(made(tau=0.99), room=200)
    keys = torch.randn(1, 120, 2)
    step.prompt(keys[:, :40])
    for i in range(40, 80):
        query = torch.tensor([TO_NORTH if i % 7 else TO_WEST])
        step.decode(query, tuple(keys[0, i].tolist()), 6)
    step.length = 64  # the cache was cropped, where a segment began
    for i in range(64, 100):
        step.decode(torch.tensor([TO_WEST]), tuple(keys[0, i].tolist()), 6)
    check_means(step.index, keys[:, :100])
    step.length = 30  # into the prompt: neighbours become one cluster
    step.prompt(keys[:, 30:90])
    step.decode(torch.tensor([TO_NORTH]), NORTH, 6)
    places, sizes = step.index._pool.units(np.zeros(1, dtype=np.int64), 90)
    assert int(sizes.sum()) == 90
    held = [
        int(token)
        for place, size in zip(places[0], sizes[0], strict=True)
        for token in step.index._pool.members[0, place : place + size]
    ]
    assert sorted(held) == list(range(90))


@pytest.mark.parametrize("summary", SUMMARIES)
def test_what_is_paid_for_is_what_is_allocated(summary: str) -> None:
    policy = made(block_tokens=32, summary=summary)
    step = Step(policy, rows=4, sequences=2, room=500)
    index, sizes = step.index, policy._unit_sizes(500)
    held = [index._pool, index._pool._clusters, index._blocks, index.boundaries]
    tensors = [v for thing in held for v in vars(thing).values() if isinstance(v, Tensor)]
    arrays = [index._pool._segments.starts, index._pool._segments.ends]
    by_address = {t.data_ptr(): t.nbytes for t in tensors}
    total = sum(by_address.values()) + sum(a.nbytes for a in arrays)
    booked = SemanticUnitsIndex.num_bytes(
        SHAPE, sizes, batch=4, max_tokens=500, rows_per_sequence=2
    )
    # Without the block under way there are the two halves.
    under_way = BlockClusterer.num_bytes(
        rows=4, block_tokens=32, cluster_tokens=4, head_dim=2, itemsize=4,
        elements=sizes.elements(4), squares=sizes.squares,
    )  # fmt: skip
    working = under_way - 2 * 4 * 32 * 2 * 4
    assert total <= booked - working <= total + 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1.5}, "tau=1.5 is a cosine"),
        ({"boundaries": "stride:0"}, "stride:N"),
        ({"boundaries": "sometimes"}, "boundaries=sometimes"),
        ({"units": "words"}, "units=words"),
        ({"nearness": "taste"}, "nearness=taste"),
        ({"summary": "plot"}, "summary=plot"),
        ({"cluster_tokens": 0}, "cluster_tokens=0"),
        ({"block_tokens": 20}, "block_tokens=20"),
        ({"group_tokens": 2}, "group_tokens must be 1"),
        ({"reuse_tokens": 800}, "no reuse_tokens"),
    ],
)
def test_refuses_what_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LouisKV(**options)


def test_the_end_of_a_prompt_has_as_many_clusters_as_its_tokens_ask_for() -> None:
    """One mean for all of a question's tokens finds none of them."""
    assert [num_clusters(tokens, 16) for tokens in (1, 16, 17, 33, 127)] == [1, 1, 2, 3, 8]
    assert [num_clusters(tokens, 16) for tokens in (128, 1024, 4096)] == [7, 63, 255]
