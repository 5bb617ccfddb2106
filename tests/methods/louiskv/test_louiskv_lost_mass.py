"""LouisKV's own trigger: rows retrieve when what they hold loses attention."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.device_tier.device_index import StepClock
from penstock.engine.policy import IndexRequest
from penstock.kernels.unit_selection import renew_units, taken_tokens, unit_scores, unit_weights
from penstock.methods.louiskv.device_index import DeviceSemanticUnits, DeviceUnitSizes
from penstock.methods.louiskv.index import SemanticUnitsIndex
from penstock.methods.louiskv.policy import LouisKV

SHAPE = KVShape(
    num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=4, dtype=torch.float32
)  # fmt: skip
DIRECTIONS = torch.eye(4)


class Decoder:
    """Two KV heads of one sequence; the prompt has four clusters of four tokens in each."""

    def __init__(self, **options: float) -> None:
        self.policy = LouisKV(
            window_tokens=1, sink_tokens=0, cluster_tokens=4, block_tokens=64, beside=True,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.index = self._made(2)
        self.length = 0
        keys = DIRECTIONS.repeat(6, 1).expand(2, 24, 4)
        self.append(keys)

    def _made(self, rows: int) -> SemanticUnitsIndex:
        request = IndexRequest(
            shape=SHAPE, batch=rows, max_units=64, group_tokens=1, scaling=1.0, adapter=None,
            device=torch.device("cpu"), score_tokens=0, selected_units=0, rows_per_sequence=rows,
        )  # fmt: skip
        index = self.policy.make_index(request)
        assert isinstance(index, SemanticUnitsIndex)
        return index

    def append(self, keys: Tensor) -> None:
        self.index.append(keys.unsqueeze(2), self.length)
        self.length += keys.shape[1]

    def step(self, query: Tensor, total: float = math.log(100)) -> Selection:
        """query: [rows, 4]; total: log-sum-exp that attention then has seen."""
        first = np.zeros(2, dtype=np.int64)
        self.index.begin_step(query.unsqueeze(1), first, self.length)
        chosen = self.policy.select(
            self.index, query.unsqueeze(1), first, self.length - 1, 6
        )  # fmt: skip
        self.append(torch.zeros(2, 1, 4))
        assert self.index.lse is not None
        self.index.lse.fill_(total)
        return chosen


def to(*directions: int, weight: float = 4.0) -> Tensor:
    """A query for each KV head: its direction weighs `weight` a token, the others 1."""
    return DIRECTIONS[list(directions)] * math.log(weight)


def test_a_head_retrieves_where_its_own_attention_went() -> None:
    decoder = Decoder()
    assert decoder.step(to(0, 0)).unit_ids.tolist() == [[0, 4, 8, 12, 16, 20]] * 2
    same = decoder.step(to(0, 0))
    assert same.reused is not None
    assert same.reused.tolist() == [True, True]
    # To the second direction: each of its six tokens has 4 of 100, those held have 1.
    moved = decoder.step(to(0, 1))
    assert moved.reused is not None
    assert moved.reused.tolist() == [True, False]
    assert moved.unit_ids.tolist() == [[0, 4, 8, 12, 16, 20], [1, 5, 9, 13, 17, 21]]
    assert decoder.index.counters.retrievals == (1.5,)
    assert decoder.index.counters.reuse_steps == (1.5,)


@pytest.mark.parametrize(("lost_mass", "moves"), [(0.17, True), (0.19, False)])
def test_what_may_be_lost_is_a_share_of_all_attention(lost_mass: float, moves: bool) -> None:
    """Six tokens of weight 4 in place of six of weight 1, of 41 in 42 of 100: 0.176."""
    decoder = Decoder(lost_mass=lost_mass)
    decoder.step(to(0, 0))
    found = decoder.step(to(0, 1))
    assert found.reused is not None
    assert found.reused.tolist() == [True, not moves]


def test_what_is_lost_adds_up() -> None:
    decoder = Decoder(lost_mass=0.4)
    decoder.step(to(0, 0))
    steps = [decoder.step(to(0, 1)).reused for _ in range(4)]
    assert [step.tolist() for step in steps if step is not None] == [
        [True, True], [True, True], [True, False], [True, True],
    ]  # fmt: skip


def test_a_head_that_looks_elsewhere_does_not_read() -> None:
    """The same turn where sinks and window have 99.9 % of the attention."""
    decoder = Decoder()
    decoder.step(to(0, 0), total=math.log(1e5))
    found = decoder.step(to(1, 1))
    assert found.reused is not None
    assert found.reused.all()


def test_what_is_held_gives_way_to_twice_its_score_only() -> None:
    decoder = Decoder(lost_mass=0.0)
    decoder.step(to(0, 0))
    hardly = to(0, 0) + to(1, 1, weight=7.0)  # 4 against 7
    assert decoder.step(hardly).unit_ids.tolist() == [[0, 4, 8, 12, 16, 20]] * 2
    clearly = to(0, 0) + to(1, 1, weight=9.0)
    assert decoder.step(clearly).unit_ids.tolist() == [[1, 5, 9, 13, 17, 21]] * 2


def test_asking_again_says_the_same_and_counts_once() -> None:
    decoder = Decoder()
    decoder.step(to(0, 0))
    first, query = np.zeros(2, dtype=np.int64), to(1, 0).unsqueeze(1)
    decoder.index.begin_step(query, first, decoder.length)
    once = decoder.policy.select(decoder.index, query, first, decoder.length - 1, 6)
    decoder.index.begin_step(query, first, decoder.length)
    again = decoder.policy.select(decoder.index, query, first, decoder.length - 1, 6)
    assert np.array_equal(once.unit_ids, again.unit_ids)
    assert once.reused is not None
    assert again.reused is not None
    assert np.array_equal(once.reused, again.reused)
    assert decoder.index.counters.retrievals == (1.5,)


def test_a_new_prompt_and_a_crop_leave_nothing_known() -> None:
    decoder = Decoder(lost_mass=0.9)
    decoder.step(to(0, 0))
    decoder.append(DIRECTIONS[1].expand(2, 4, 4))
    found = decoder.step(to(1, 1))
    assert found.reused is not None
    assert not found.reused.any()
    assert decoder.step(to(0, 0)).reused.all()  # type: ignore[union-attr]
    decoder.length -= 1
    assert not decoder.step(to(0, 0)).reused.any()  # type: ignore[union-attr]


def test_rows_that_were_taken_over_select_anew() -> None:
    decoder = Decoder()
    decoder.step(to(0, 1))
    decoder.index.take_rows_from(decoder.index, torch.tensor([1, 0]))
    found = decoder.step(to(1, 0))
    assert found.reused is not None
    assert not found.reused.any()
    assert found.unit_ids.tolist() == [[1, 5, 9, 13, 17, 21], [0, 4, 8, 12, 16, 20]]


@pytest.mark.parametrize(
    ("options", "finest"),
    [
        ({}, (4, 1024, True)), ({"summary": "mean"}, (4, 1024, False)),
        ({"tau": 0.85}, (16, 4096, False)), ({"boundaries": "every"}, (16, 4096, False)),
        ({"boundaries": "stride:4", "summary": "mean+spread"}, (16, 4096, True)),
        ({"cluster_tokens": 8}, (8, 2048, True)),
    ],
)  # fmt: skip
def test_units_are_small_where_no_trigger_of_the_paper_is_chosen(
    options: dict[str, Any], finest: tuple[int, int, bool]
) -> None:
    request = SizingRequest(
        shape=KVShape(
            num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
        ),
        batch=1, max_tokens=16384, limit_bytes=None, sector_bytes=512,
        device_is_cpu=True, has_adapter=False,
    )  # fmt: skip
    policy, _ = LouisKV(selected_tokens=512, **options).plan(request)
    assert isinstance(policy, LouisKV)
    assert policy.cluster_tokens is not None
    sizes = policy._unit_sizes(16384)
    assert (sizes.cluster_tokens, sizes.block_tokens, sizes.squares) == finest


def test_segments_are_as_long_as_clusters() -> None:
    decoder = Decoder()
    for _ in range(9):
        decoder.step(to(0, 0))
    assert decoder.index.counters.segment_tokens == {1: 1, 4: 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lost_mass": -0.1}, "lost_mass=-0.1 is a share"),
        ({"lost_mass": 1.0}, "lost_mass=1.0 is a share"),
        ({"tau": 0.7, "lost_mass": 0.1}, "give one of them"),
    ],
)
def test_refuses_what_makes_no_sense(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LouisKV(**options)  # type: ignore[arg-type]


# A new selection, and the device's form ----------------------------------------------------------


def test_renewal_by_hand() -> None:
    """A budget of three: two of unit 2, then one of unit 1; held unit 0 had scored less."""
    scores = torch.tensor([[0.1, 0.2, 0.3]])
    sizes = torch.tensor([[2, 2, 2]])
    held = torch.tensor([[2, 0, 0]], dtype=torch.int32)
    renewal = renew_units(scores, sizes, held, 3, 1.0)
    assert renewal.taken.tolist() == [[0, 1, 2]]
    assert renewal.gain.item() == pytest.approx(2 * 0.3 + 0.2 - 2 * 0.1)
    first, members = torch.tensor([[0, 2, 4]]), torch.tensor([[9, 8, 7, 6, 5, 4]])
    tokens, real = taken_tokens(renewal.taken, first, members, 4)
    assert tokens.tolist() == [[7, 5, 4, 0]]
    assert real.tolist() == [[True, True, True, False]]
    assert renew_units(scores, sizes, held, 3, 4.0).taken.tolist() == [[2, 0, 1]]


def test_scores_are_shares_of_attention() -> None:
    query, means = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[0.0], [1.0], [9.0]]])
    sizes, sums = torch.tensor([[2, 1, 0]]), torch.zeros(1, 2)
    weights = unit_weights(torch.tensor([[1.0, 9.0]]), torch.tensor([[1.0 + math.log(4), 2.0]]))
    assert weights[0].tolist() == pytest.approx([0.25, 1.0])
    scores = unit_scores(query, means, sizes, 1.0, weights=weights, sums=sums)
    e, e2 = math.e, math.e**2
    expected = [0.125 / (2 + e) + 0.5 / (2 + e2), 0.125 * e / (2 + e) + 0.5 * e2 / (2 + e2), -1.0]
    assert scores[0].tolist() == pytest.approx(expected)
    assert sums[0].tolist() == pytest.approx([math.log(2 + e), math.log(2 + e2)])
    unknown = unit_weights(torch.zeros(1), torch.tensor([-math.inf]))
    assert unknown.item() == 1.0


@pytest.mark.parametrize("summary", [None, "mean"])
def test_the_device_retrieves_when_the_host_does(summary: str | None) -> None:
    """The same keys, queries and sums through both forms of the index."""
    torch.manual_seed(0)
    rows, length, steps, wanted, window = 2, 96, 24, 16, 2
    host = LouisKV(
        window_tokens=window - 1, sink_tokens=0, cluster_tokens=4, block_tokens=96, beside=True,
        summary=summary,
    )  # fmt: skip
    request = IndexRequest(
        shape=SHAPE, batch=rows, max_units=256, group_tokens=1, scaling=0.5, adapter=None,
        device=torch.device("cpu"), score_tokens=0, selected_units=wanted, rows_per_sequence=rows,
    )  # fmt: skip
    index = host.make_index(request)
    assert isinstance(index, SemanticUnitsIndex)
    device = DeviceSemanticUnits(
        SHAPE, DeviceUnitSizes(
            cluster_tokens=4, block_tokens=96, spare_units=8, upkeep=True, spread=summary is None
        ),
        rows=rows, rows_per_sequence=rows, max_tokens=256, wanted=wanted, tau=0.0, stride=4,
        every_step=False, lost_mass=host.lost_mass, scaling=0.5, device=torch.device("cpu"),
    )  # fmt: skip
    keys = 2 * torch.randn(rows, length + steps, 4)
    index.append(keys[:, :length].unsqueeze(2), 0)
    device.take(keys[:, :length].unsqueeze(2), 0)
    clock = _Clock(rows, window)
    device.begin_decode(length, clock)
    query, first, seen = torch.randn(rows, 1, 4), np.zeros(rows, dtype=np.int64), 0
    for step in range(steps):
        position = length + step
        query = 0.9 * query + 0.6 * torch.randn(rows, 1, 4)
        clock.at(position)
        index.begin_step(query, first, position)
        chosen = host.select(index, query, first, position + 1 - window, wanted)
        found = device.select(query, clock)
        assert chosen.reused is not None
        assert found.due.tolist() == (~chosen.reused).tolist(), step
        assert found.ids.sort(dim=1).values.tolist() == chosen.unit_ids.tolist(), step
        seen += int(found.due.sum())
        now = keys[:, position : position + 1]
        index.append(now.unsqueeze(2), position)
        device.put(now.unsqueeze(2), clock)
        total = torch.logsumexp(0.5 * query @ keys[:, :position].transpose(1, 2), dim=2)
        for each in (index, device):
            assert each.lse is not None
            each.lse.copy_(total)
    assert rows < seen < rows * steps
    assert device.retrievals.tolist() == list(index.counters.retrievals)


class _Clock(StepClock):
    """What a step's clock says, without a plan."""

    def __init__(self, rows: int, window: int) -> None:
        self.window_slots = window
        self.first_unit = torch.zeros(rows, dtype=torch.int32)
        self.position = torch.zeros(1, dtype=torch.int64)
        self.end_unit, self.left = self.position.clone(), self.position.clone()

    def at(self, position: int) -> None:
        self.position.fill_(position)
        self.end_unit.fill_(position + 1 - self.window_slots)
        self.left.copy_(self.end_unit - 1)
