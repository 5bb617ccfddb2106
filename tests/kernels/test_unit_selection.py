"""Selection of units of any size: by hand, and against a loop that does as the words say."""

import math

import pytest
import torch

from penstock.kernels.unit_selection import (
    CHUNK_UNITS,
    query_similarity,
    take_units,
    unit_scores,
)


def test_similarity_by_hand() -> None:
    """Cosines 1 and 0 of one head each, lengths aside; the second sequence turns round."""
    previous = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]], [[1.0, 0.0]], [[1.0, 1.0]]])
    query = torch.tensor([[[1.0, 0.0]], [[5.0, 0.0]], [[-1.0, 0.0]], [[-2.0, -2.0]]])
    assert query_similarity(previous, query, 2).tolist() == pytest.approx([0.5, -1.0])


def test_scores_by_hand() -> None:
    """East, north and west; heads that weigh them 2 : 1 : 1/2 and 1 : 4 : 1. The last is empty."""
    means = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [9.0, 9.0]]])
    query = torch.tensor([[[math.log(2), 0.0], [0.0, math.log(4)]]])
    sizes = torch.tensor([[6, 6, 2, 0]])
    scores = unit_scores(query, means, sizes, 1.0)
    assert scores[0].tolist() == pytest.approx([31 / 84, 40 / 84, 13 / 84, -1.0])
    assert torch.allclose(unit_scores(2 * query, means, sizes, 0.5), scores)


def test_scores_of_many_units_and_of_some_rows() -> None:
    torch.manual_seed(0)
    units = 2 * CHUNK_UNITS + 7
    query, means = torch.randn(3, 2, 8), torch.randn(3, units + 5, 8)
    sizes = torch.randint(0, 3, (3, units))
    scores = unit_scores(query, means, sizes, 0.3)
    logits = (query @ means[:, :units].transpose(1, 2) * 0.3).masked_fill(
        sizes[:, None] == 0, -math.inf
    )
    assert torch.allclose(scores.clamp_min(0), logits.softmax(-1).mean(1), atol=1e-6)
    which = torch.tensor([2, 0])
    some = unit_scores(query[which], means, sizes[which], 0.3, which)
    assert torch.allclose(some, scores[which], atol=1e-6)


def test_taking_by_hand() -> None:
    """Units of 2, 3 and 1 tokens; the best two make 4, the budget of 3 takes the second in part."""
    members = torch.tensor([[5, 8, 0, 3, 9, 7]])
    first, sizes = torch.tensor([[0, 2, 5]]), torch.tensor([[2, 3, 1]])
    scores = torch.tensor([[0.1, 0.6, 0.3]])
    for budget, expected in ((3, [0, 3, 9]), (4, [0, 3, 9, 7]), (5, [0, 3, 9, 7, 5])):
        tokens, taken = take_units(scores, first, sizes, members, budget)
        assert tokens.tolist() == [expected]
        assert bool(taken.all())
    tokens, taken = take_units(scores, first, sizes, members, 8)
    assert taken.tolist() == [[True] * 6 + [False] * 2]
    assert tokens[taken].tolist() == [0, 3, 9, 7, 5, 8]


def test_taking_is_the_loop_over_units() -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(50):
        sizes = torch.randint(0, 6, (3, 9), generator=random)
        first = sizes.cumsum(1) - sizes
        members = torch.stack([torch.randperm(60, generator=random) for _ in range(3)])
        scores = torch.rand(3, 9, generator=random)
        budget = int(torch.randint(1, 60, (1,), generator=random))
        tokens, taken = take_units(scores, first, sizes, members.to(torch.int16), budget)
        for row in range(3):
            expected: list[int] = []
            for unit in scores[row].argsort(descending=True).tolist():
                start = int(first[row, unit])
                expected += members[row, start : start + int(sizes[row, unit])].tolist()
            assert tokens[row][taken[row]].tolist() == expected[:budget]
