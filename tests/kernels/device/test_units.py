"""Scoring and taking units on the device: both forms against the functions of the host engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.device.units import (
    HeadSums,
    UnitScratch,
    Upkeep,
    score_units,
    score_units_twin,
    select_tokens,
    select_tokens_twin,
)
from penstock.kernels.unit_selection import take_units, unit_scores

Kernel = Callable[..., None]


@pytest.fixture(params=["torch", "triton"])
def score(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if request.param == "torch":
        yield score_units_twin
    else:
        request.getfixturevalue("triton")
        from penstock.kernels.device import units_triton

        yield units_triton.score_units


@pytest.fixture(params=["torch", "triton"])
def select(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if request.param == "torch":
        yield select_tokens_twin
    else:
        request.getfixturevalue("triton")
        from penstock.kernels.device import units_triton

        yield units_triton.select_tokens


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "capacity", "dtype", "means_dtype"),
    [
        (2, 4, 32, 100, torch.bfloat16, torch.bfloat16),
        (3, 1, 24, 65, torch.float16, torch.float16),
        (2, 3, 16, 300, torch.float32, torch.float32),
        (1, 20, 64, 64, torch.float32, torch.float32),
        (2, 8, 8, 5, torch.float32, torch.float32),
        (2, 2, 16, 1, torch.float32, torch.float32),
        (2, 2, 16, 70, torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("spread", [False, True])
def test_scores_are_the_hosts(
    score: Kernel, device: torch.device, rows: int, heads: int, dim: int, capacity: int,
    dtype: torch.dtype, means_dtype: torch.dtype, spread: bool,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    query = (3 * torch.randn(rows, heads, 2 * dim, device=device)).to(dtype)[..., :dim]
    means = torch.randn(rows, capacity, dim, device=device).to(means_dtype)
    sizes = torch.randint(-1, 3, (rows, capacity), dtype=torch.int32, device=device)
    count = torch.tensor([capacity, capacity // 2, 0][:rows], dtype=torch.int32, device=device)
    due = torch.tensor([True, True, True][:rows], device=device)
    out = torch.full((rows, capacity), 7.0, device=device)
    halves = torch.rand(rows, capacity, device=device) if spread else None
    score(query, means, sizes, count, dim**-0.5, due, out, spread=halves)
    within = torch.arange(capacity, device=device) < count[:, None]
    held, squares = sizes.clamp_min(0) * within, None
    if halves is not None:
        squares = means.float().square().sum(dim=2) + 2 * dim * halves
    expected = unit_scores(query, means, held, dim**-0.5, squares=squares)
    tolerance = 1e-5 if torch.float32 in (dtype, means_dtype) else 1e-4
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert out[~within | (sizes <= 0)].eq(-1.0).all()
    if spread and capacity > 5:
        plain = unit_scores(query, means, held, dim**-0.5)
        assert (out - plain).abs().max() > 0.01, "the spread counts"


@pytest.mark.parametrize(
    ("programs", "due_rows"),
    [
        (1, [0, 1, 2, 3, 4]),
        (4, [0, 1, 2, 3, 4]),
        (4, [1, 3]),
        (1000, [1, 3]),
        (1, [4]),
        (1000, []),
    ],
)
def test_programs_share_the_rows_that_are_due(
    triton: None, device: torch.device, monkeypatch: pytest.MonkeyPatch, programs: int,
    due_rows: list[int],
) -> None:  # fmt: skip
    """As with many rows and units: blocks do not divide among programs, the last one is short."""
    from penstock.kernels.device import units_triton

    monkeypatch.setattr(units_triton, "_PROGRAMS", programs)
    torch.manual_seed(4)
    query, means = torch.randn(5, 4, 16, device=device), torch.randn(5, 300, 16, device=device)
    sizes = torch.randint(0, 3, (5, 300), dtype=torch.int32, device=device)
    count = torch.tensor([290, 130, 300, 64, 65], dtype=torch.int32, device=device)
    due = torch.zeros(5, dtype=torch.bool, device=device)
    due[due_rows] = True
    out, expected = torch.full((5, 300), 7.0, device=device), torch.full((5, 300), 7.0).to(device)
    units_triton.score_units(query, means, sizes, count, 0.25, due, out)
    score_units_twin(query, means, sizes, count, 0.25, due, expected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_rows_not_due_keep_their_scores(score: Kernel, device: torch.device) -> None:
    """With scratch that was used for other scores, and not cleared."""
    torch.manual_seed(1)
    query, means = torch.randn(3, 2, 16, device=device), torch.randn(3, 130, 16, device=device)
    sizes = torch.ones(3, 130, dtype=torch.int32, device=device)
    count = torch.full((3,), 130, dtype=torch.int32, device=device)
    scratch = UnitScratch.allocate(3, 2, 130, device)
    scratch.logits.fill_(torch.nan)
    scratch.partial.fill_(torch.nan)
    out = torch.full((3, 130), 7.0, device=device)
    for due in ([True, False, False], [False, False, True]):
        score(query, means, sizes, count, 0.25, torch.tensor(due, device=device), out, scratch)
    assert out[1].eq(7.0).all()
    torch.testing.assert_close(out[[0, 2]].sum(dim=1), torch.ones(2, device=device))
    expected = unit_scores(query, means, sizes, 0.25)
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=1e-5)


def test_a_far_off_unit_takes_everything(score: Kernel, device: torch.device) -> None:
    """Logits of thousands in the last block: the softmax is by the maximum of all blocks."""
    query = torch.ones(1, 2, 16, device=device)
    means = torch.linspace(-1, 1, 200, device=device)[None, :, None].repeat(1, 1, 16)
    means[0, 150] = 100.0
    sizes = torch.ones(1, 200, dtype=torch.int32, device=device)
    count = torch.tensor([200], dtype=torch.int32, device=device)
    out = torch.zeros(1, 200, device=device)
    score(query, means, sizes, count, 1.0, torch.ones(1, dtype=torch.bool, device=device), out)
    assert out[0].nonzero().tolist() == [[150]]
    assert out[0, 150] == 1.0


def _units(
    seed: int, capacity: int, largest: int, levels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Three rows of random units: scores on few levels (ties), some empty; count and members."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-1, largest + 1, (3, capacity), generator=random, dtype=torch.int32)
    first = (sizes.clamp_min(0).cumsum(1) - sizes.clamp_min(0)).to(torch.int32)
    tokens = max(1, largest * capacity)
    members = torch.stack([torch.randperm(tokens, generator=random) for _ in range(3)])
    scores = torch.randint(0, levels, (3, capacity), generator=random) / levels
    scores[sizes <= 0] = -1.0
    count = torch.tensor([capacity, capacity // 2, int(seed % 2)], dtype=torch.int32)
    return scores, first, sizes, count, members


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_hosts(select: Kernel, device: torch.device, seed: int) -> None:
    capacity, largest, levels, budget = (
        (37, 5, 4, 40), (64, 3, 1000, 16), (1, 9, 2, 4), (33, 4, 1, 31), (100, 2, 10**6, 200),
        (17, 6, 3, 1),
    )[seed % 6]  # fmt: skip
    scores, first, sizes, count, members = _units(seed, capacity, largest, levels)
    dtype = torch.int16 if seed % 2 else torch.int32
    ids = torch.full((3, budget), 9, dtype=torch.int32, device=device)
    valid = torch.ones(3, budget, dtype=torch.bool, device=device)
    due = torch.ones(3, dtype=torch.bool, device=device)
    select(
        scores.to(device), first.to(device), sizes.to(device), count.to(device),
        members.to(device, dtype), due, ids, valid,
    )  # fmt: skip
    ids, valid = ids.cpu(), valid.cpu()
    used = torch.where(torch.arange(capacity) < count[:, None], sizes.clamp_min(0), 0)
    expected, taken = take_units(scores, first, used, members, budget)
    for row in range(3):
        real = int(taken[row].sum())
        assert valid[row].tolist() == [True] * real + [False] * (budget - real)
        assert ids[row, real:].eq(0).all()
        assert set(ids[row, :real].tolist()) == set(expected[row, :real].tolist())
        # Unit after unit, each from its first member on.
        chosen, wanted = set(ids[row, :real].tolist()), []
        for unit in range(capacity):
            begin = int(first[row, unit])
            part = members[row, begin : begin + int(used[row, unit])].tolist()
            wanted += [token for token in part if token in chosen]
        assert ids[row, :real].tolist() == wanted


def test_tokens_by_hand(select: Kernel, device: torch.device) -> None:
    """The best unit is the last; of the two equal ones the first is taken before the second."""
    scores = torch.tensor([[0.2, 0.2, -1.0, 0.6], [0.1, 0.2, 0.3, 0.4]], device=device)
    sizes = torch.tensor([[2, 3, 0, 2], [1, 1, 1, 1]], dtype=torch.int32, device=device)
    first = torch.tensor([[0, 2, 5, 5], [0, 1, 2, 3]], dtype=torch.int32, device=device)
    members = torch.tensor([[8, 9, 3, 4, 5, 0, 1]], dtype=torch.int32, device=device).repeat(2, 1)
    count = torch.tensor([4, 4], dtype=torch.int32, device=device)
    due = torch.tensor([True, False], device=device)
    for budget, expected in ((3, [8, 0, 1]), (5, [8, 9, 3, 0, 1]), (1, [0])):
        ids = torch.full((2, budget), 77, dtype=torch.int32, device=device)
        valid = torch.zeros(2, budget, dtype=torch.bool, device=device)
        scratch = UnitScratch.allocate(2, 1, 4, device)
        scratch.ends.fill_(-5)
        select(scores, first, sizes, count, members, due, ids, valid, scratch)
        assert ids.tolist() == [expected, [77] * budget]
        assert valid.tolist() == [[True] * budget, [False] * budget]


def test_scores_as_shares_of_attention(score: Kernel, device: torch.device) -> None:
    """Units count by their tokens, heads by what they had on units in the step before: all of it
    where that is not known. Every row is scored, and its sums are taken down."""
    torch.manual_seed(4)
    query, means = torch.randn(2, 2, 16, device=device), torch.randn(2, 70, 16, device=device)
    sizes = torch.randint(0, 3, (2, 70), dtype=torch.int32, device=device)
    count = torch.full((2,), 70, dtype=torch.int32, device=device)
    sums = HeadSums.allocate(2, 2, device)
    sums.attended.copy_(torch.tensor([[2.0, float("-inf")], [5.0, 1.0]]))
    sums.before.copy_(torch.tensor([[1.0, 3.0], [2.0, 1.5]]))
    weights = torch.tensor([[-1.0, 0.0], [-3.0, 0.0]], device=device).exp()
    out = torch.zeros(2, 70, device=device)
    score(query, means, sizes, count, 0.25, None, out, sums=sums)
    each = (torch.einsum("rhd,rud->rhu", query, means) * 0.25).exp()
    whole = (each * sizes.unsqueeze(1)).sum(dim=2)
    expected = (each / whole.unsqueeze(2) * weights.unsqueeze(2)).mean(dim=1)
    expected.masked_fill_(sizes == 0, -1.0)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums.now, whole.log(), atol=1e-5, rtol=1e-5)


def test_a_row_selects_anew_where_it_gains_enough(select: Kernel, device: torch.device) -> None:
    """Row 0 would gain 0.3 of two tokens, row 1 keeps its unit against one that is hardly better,
    row 2 is due whatever it gains."""
    scores = torch.tensor(
        [[0.1, 0.25, 0.05], [0.1, 0.15, 0.05], [0.1, 0.1, 0.1]], device=device
    )  # fmt: skip
    sizes = torch.full((3, 3), 2, dtype=torch.int32, device=device)
    first = torch.tensor([[0, 2, 4]], dtype=torch.int32, device=device).repeat(3, 1)
    members = torch.arange(6, dtype=torch.int32, device=device).repeat(3, 1)
    count = torch.full((3,), 3, dtype=torch.int32, device=device)
    held = torch.tensor([[2, 0, 0], [2, 0, 0], [0, 0, 2]], dtype=torch.int32, device=device)
    due = torch.tensor([False, False, True], device=device)
    ids = torch.tensor([[0, 1], [0, 1], [9, 9]], dtype=torch.int32, device=device)
    valid = torch.ones(3, 2, dtype=torch.bool, device=device)
    upkeep = Upkeep.allocate(3, 2, 3, device, lost_mass=0.01, keep=2.0)
    upkeep.current.copy_(held)
    upkeep.sums.now.copy_(torch.arange(6.0).view(3, 2))
    select(scores, first, sizes, count, members, due, ids, valid, upkeep=upkeep)
    assert due.tolist() == [True, False, True]
    assert ids.tolist() == [[2, 3], [0, 1], [4, 5]]
    assert upkeep.current.tolist() == [[0, 2, 0], [2, 0, 0], [0, 0, 2]]
    assert upkeep.renewed.tolist() == [1, 0, 1]
    assert upkeep.lost.tolist() == [0, 0, 0]
    assert torch.equal(upkeep.sums.before, upkeep.sums.now)
    due.zero_()
    upkeep = replace(upkeep, keep=1.0)
    select(scores, first, sizes, count, members, due, ids, valid, upkeep=upkeep)
    assert due.tolist() == [False, True, False], "0.1 is gained without the preference"
    assert ids.tolist() == [[2, 3], [2, 3], [4, 5]]


def test_what_rows_lose_adds_up(select: Kernel, device: torch.device) -> None:
    """0.04 a step, of which 0.1 may be lost: the third step selects anew."""
    scores = torch.tensor([[0.01, 0.03]], device=device)
    sizes = torch.full((1, 2), 2, dtype=torch.int32, device=device)
    places = torch.tensor([[0, 2]], dtype=torch.int32, device=device)
    members = torch.arange(4, dtype=torch.int32, device=device)[None]
    count = torch.full((1,), 2, dtype=torch.int32, device=device)
    ids = torch.zeros(1, 2, dtype=torch.int32, device=device)
    valid = torch.ones(1, 2, dtype=torch.bool, device=device)
    upkeep = Upkeep.allocate(1, 1, 2, device, lost_mass=0.1, keep=2.0)
    upkeep.current[0, 0] = 2
    seen = []
    for _ in range(4):
        due = torch.zeros(1, dtype=torch.bool, device=device)
        select(scores, places, sizes, count, members, due, ids, valid, upkeep=upkeep)
        seen.append(bool(due))
    assert seen == [False, False, True, False]
    assert ids.tolist() == [[2, 3]]


def test_scores_of_any_sign_and_size(select: Kernel, device: torch.device) -> None:
    """Denormals, both zeros, infinities and scores below zero are in order, too."""
    values = [-1.5, 1e-40, 0.0, -0.0, float("inf"), -1e-40, 2.0, 1.0, -3.0]
    order = [4, 6, 7, 1, 2, 3, 5, 0, 8]
    scores = torch.tensor([values], device=device)
    sizes = torch.ones(1, 9, dtype=torch.int32, device=device)
    places = torch.arange(9, dtype=torch.int32, device=device)[None]
    count = torch.tensor([9], dtype=torch.int32, device=device)
    due = torch.ones(1, dtype=torch.bool, device=device)
    for budget in range(1, 10):
        ids = torch.zeros(1, budget, dtype=torch.int32, device=device)
        valid = torch.zeros(1, budget, dtype=torch.bool, device=device)
        select(scores, places, sizes, count, places, due, ids, valid)
        assert ids[0].tolist() == sorted(order[:budget])
        assert valid.all()


def test_many_units(select: Kernel, device: torch.device) -> None:
    scores, first, sizes, count, members = _units(3, 5000, 4, 10**6)
    ids = torch.zeros(3, 1000, dtype=torch.int32, device=device)
    valid = torch.zeros(3, 1000, dtype=torch.bool, device=device)
    due = torch.ones(3, dtype=torch.bool, device=device)
    select(
        scores.to(device), first.to(device), sizes.to(device), count.to(device),
        members.to(device, torch.int32), due, ids, valid,
    )  # fmt: skip
    used = torch.where(torch.arange(5000) < count[:, None], sizes.clamp_min(0), 0)
    expected, taken = take_units(scores, first, used, members, 1000)
    assert torch.equal(valid.cpu(), taken)
    assert torch.equal(ids.cpu().sort(dim=1).values, expected.int().sort(dim=1).values)


def test_public_functions_choose_a_form(device: torch.device) -> None:
    torch.manual_seed(2)
    query, means = torch.randn(2, 2, 16, device=device), torch.randn(2, 8, 16, device=device)
    sizes = torch.ones(2, 8, dtype=torch.int32, device=device)
    count = torch.full((2,), 8, dtype=torch.int32, device=device)
    due = torch.ones(2, dtype=torch.bool, device=device)
    out = torch.zeros(2, 8, device=device)
    score_units(query, means, sizes, count, 0.25, due, out)
    torch.testing.assert_close(out, unit_scores(query, means, sizes, 0.25), atol=1e-5, rtol=1e-5)
    places = torch.arange(8, dtype=torch.int32, device=device).repeat(2, 1)
    ids = torch.zeros(2, 3, dtype=torch.int32, device=device)
    valid = torch.zeros(2, 3, dtype=torch.bool, device=device)
    select_tokens(out, places, sizes, count, places, due, ids, valid)
    assert torch.equal(ids.long(), out.topk(3).indices.sort(dim=1).values)
    assert valid.all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_both_can_be_captured(score: Kernel, select: Kernel, device: torch.device) -> None:
    """A graph replayed with other contents gives what a call gives."""
    torch.manual_seed(3)
    query, means = torch.randn(2, 4, 64, device=device), torch.randn(2, 500, 64, device=device)
    sizes = torch.randint(0, 4, (2, 500), dtype=torch.int32, device=device)
    first = (sizes.cumsum(1) - sizes).int()
    members = torch.arange(2000, dtype=torch.int32, device=device).repeat(2, 1)
    count = torch.full((2,), 500, dtype=torch.int32, device=device)
    due = torch.ones(2, dtype=torch.bool, device=device)
    out, ids = torch.zeros(2, 500, device=device), torch.zeros(2, 64, device=device).int()
    valid = torch.zeros(2, 64, dtype=torch.bool, device=device)

    def step() -> None:
        score(query, means, sizes, count, 0.125, due, out)
        select(out, first, sizes, count, members, due, ids, valid)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    query.normal_()
    count.copy_(torch.tensor([300, 500]))
    graph.replay()
    replayed = ids.clone()
    step()
    assert torch.equal(replayed, ids)
    expected, _ = take_units(out, first, sizes, members, 64)
    assert torch.equal(ids.long().sort(dim=1).values, expected.sort(dim=1).values)
