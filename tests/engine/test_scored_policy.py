"""ScoredPolicy: summaries worked by hand, what they cost, and what a wrong price says."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest
from penstock.engine.policy import IndexRequest
from penstock.engine.scored_policy import ScoredIndex, ScoredPolicy
from penstock.methods import Quest
from penstock.methods.baselines.arkvale import ArkVale

SHAPE = KVShape(num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=2, dtype=torch.float32)
PAGES = torch.tensor([
    # From 0 to 4 and from -2 to 2: centre (2, 0), distances 2, 2, 1, 1 and 2, 2, 0, 0.
    [0.0, -2.0], [4.0, 2.0], [1.0, 0.0], [3.0, 0.0],
    # One key four times: the bounds and the centre are it, and nothing around.
    [3.0, -1.0], [3.0, -1.0], [3.0, -1.0], [3.0, -1.0],
]).view(1, 8, 1, 2)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rounded(ScoredPolicy):
    """A mean of each unit in 8 bits with its scale, of all heads together."""

    name: ClassVar[str] = "rounded"

    priced: int = 0
    """Bytes that a summary is said to take too many."""

    @override
    def summary_bytes(self, shape: KVShape) -> int:
        return shape.num_kv_heads * (shape.head_dim + 4) + self.priced

    @override
    def summarise(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        mean = keys.mean(dim=3)
        scale = mean.abs().amax(dim=3).clamp_min(1e-6) / 127
        return (mean / scale.unsqueeze(3)).round().to(torch.int8), scale

    @override
    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        codes, scale = summary
        return (codes.float() @ query) * scale.unsqueeze(3)


def make_index(policy: ScoredPolicy, shape: KVShape, batch: int = 1, units: int = 3) -> ScoredIndex:
    index = policy.make_index(
        IndexRequest(
            shape=shape, batch=batch, max_units=units, group_tokens=4, scaling=1.0, adapter=None,
            device=torch.device("cpu"), score_tokens=0, selected_units=2,
        )
    )  # fmt: skip
    assert isinstance(index, ScoredIndex)
    return index


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # Query (1, -2): at most 4 + 4 within the first bounds, 3 + 2 within the second.
        # Query (0, 1): 2, -1.
        (Quest(), [10.0, 4.0]),
        # Half-extents of the first page: (1.5, 1).
        # Query (1, -2): 2 + 0 + 1.5 + 2 = 5.5, 3 + 2 = 5. Query (0, 1): 0 + 1 = 1, -1.
        (ArkVale(), [6.5, 4.0]),
    ],
)
def test_by_hand(policy: ScoredPolicy, expected: list[float]) -> None:
    index = make_index(policy, SHAPE)
    index.append(PAGES, 0)
    query = torch.tensor([[[1.0, -2.0], [0.0, 1.0]]])
    assert index.score(query, 2).tolist() == [expected]


@pytest.mark.parametrize("policy", [Quest(), ArkVale(), Rounded()])
def test_a_unit_at_a_time_is_the_same(policy: ScoredPolicy) -> None:
    """By the host, and by a number that only the device knows."""
    shape = replace(SHAPE, num_query_heads=4, num_kv_heads=2)
    torch.manual_seed(0)
    keys, query = torch.randn(2, 12, 2, 2), torch.randn(2, 4, 2)
    whole, pieces, put = (make_index(policy, shape, batch=2) for _ in range(3))
    whole.append(keys, 0)
    for unit in range(3):
        part = keys[:, 4 * unit : 4 * unit + 4]
        pieces.append(part, 4 * unit)
        put.put(part, torch.tensor([unit]))
    scores = whole.score(query, 3)
    assert torch.equal(pieces.score(query, 3), scores)
    assert torch.equal(put.score(query, 3), scores)
    assert torch.equal(whole.score(query, 2), scores[:, :2])
    pieces.take_rows_from(whole, torch.tensor([1, 1]))
    assert torch.equal(pieces.score(query[[1, 1]], 3), scores[[1, 1]])


def test_heads_have_their_own_summaries() -> None:
    """Two query heads a KV head; all four are added."""
    shape = replace(SHAPE, num_query_heads=4, num_kv_heads=2)
    keys = torch.tensor([[[127.0, 0.0], [0.0, 254.0]]]).expand(4, 2, 2)[None]
    index = make_index(Rounded(), shape)
    index.append(keys, 4)
    query = torch.tensor([[[1.0, 5.0], [2.0, 7.0], [9.0, 3.0], [8.0, -1.0]]])
    assert index.score(query, 2).tolist() == [[0.0, 127.0 * 3 + 254.0 * 2]]


def test_the_price_is_what_is_held() -> None:
    shape = replace(SHAPE, num_query_heads=4, num_kv_heads=2, head_dim=8)
    request = SizingRequest(
        shape=shape, batch=3, max_tokens=42, limit_bytes=None, sector_bytes=512,
        device_is_cpu=True, has_adapter=False,
    )  # fmt: skip
    policies: list[Any] = [Quest(group_tokens=4), ArkVale(group_tokens=4), Rounded(group_tokens=4)]
    for policy in policies:
        [(_, size)] = policy.index_sizes(request)
        index = make_index(policy, shape, batch=3, units=11)
        assert sum(part.nbytes for part in index.summary) == size.index_bytes
        assert size.scratch_bytes == 3 * 11 * 8 * 4


def test_a_wrong_price_is_told_at_once() -> None:
    with pytest.raises(AssertionError, match="rounded: a summary takes 6 bytes, not 7"):
        make_index(Rounded(priced=1), SHAPE)
