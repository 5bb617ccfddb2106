"""Scores by mean and spread, and the spread of a segment that grows: both forms of the kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels.device.boundaries import UnitSpread, UnitState, grow_units_reference
from penstock.kernels.device.units import score_units_reference
from penstock.kernels.unit_selection import unit_scores

Kernel = Callable[..., None]


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[tuple[Kernel, Kernel]]:
    if request.param == "torch":
        yield score_units_reference, grow_units_reference
    else:
        request.getfixturevalue("triton")
        from penstock.kernels.device import boundaries_triton, units_triton

        yield units_triton.score_units, boundaries_triton.grow_units


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "capacity", "dtype", "means_dtype"),
    [
        (2, 4, 32, 100, torch.bfloat16, torch.bfloat16),
        (3, 1, 24, 65, torch.float16, torch.float16),
        (2, 3, 16, 300, torch.float32, torch.float32),
        (1, 20, 64, 64, torch.float32, torch.float32),
        (2, 2, 16, 1, torch.bfloat16, torch.float32),
    ],
)
def test_scores_are_the_hosts(
    kernels: tuple[Kernel, Kernel], device: torch.device, rows: int, heads: int, dim: int,
    capacity: int, dtype: torch.dtype, means_dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    query = (3 * torch.randn(rows, heads, 2 * dim, device=device)).to(dtype)[..., :dim]
    means = torch.randn(rows, capacity, dim, device=device).to(means_dtype)
    halves = torch.rand(rows, capacity, device=device)
    sizes = torch.randint(-1, 3, (rows, capacity), dtype=torch.int32, device=device)
    count = torch.tensor([capacity, capacity // 2, 0][:rows], dtype=torch.int32, device=device)
    due = torch.tensor([True, True, True][:rows], device=device)
    out = torch.full((rows, capacity), 7.0, device=device)
    kernels[0](query, means, sizes, count, dim**-0.5, due, out, spread=halves)
    within = torch.arange(capacity, device=device) < count[:, None]
    held = sizes.clamp_min(0) * within
    squares = means.float().square().sum(dim=2) + 2 * dim * halves
    expected = unit_scores(query, means, held, dim**-0.5, squares=squares)
    tolerance = 1e-5 if torch.float32 in (dtype, means_dtype) else 1e-4
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    plain = unit_scores(query, means, held, dim**-0.5)
    if capacity > 1:
        assert (out - plain).abs().max() > 0.01


@pytest.mark.parametrize(
    ("capacity", "clusters", "dim", "dtype"),
    [(40, 0, 16, torch.float32), (12, 3, 24, torch.bfloat16), (3, 3, 8, torch.float32)],
)
def test_a_segments_spread_is_that_of_its_keys(
    kernels: tuple[Kernel, Kernel], device: torch.device, capacity: int, clusters: int, dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Two sequences of two rows; in tables that fill up the last segment goes on, in full ones
    none begins."""
    random, rows, tokens = torch.Generator().manual_seed(capacity), 4, 40
    state = UnitState.allocate(rows, capacity, device)
    state.count.fill_(clusters)
    spread = UnitSpread.allocate(rows, capacity, device)
    spread.halves.fill_(7.0)
    spread.open_square.fill_(3.0)
    means = torch.zeros(rows, capacity, dim, dtype=dtype, device=device)
    open_sum = torch.zeros(rows, dim, device=device)
    unit_of = torch.full((rows, tokens), -1, dtype=torch.int16, device=device)
    given: list[Tensor] = []
    for position in range(tokens):
        boundary = torch.rand(2, generator=random) < 0.3
        keys = torch.randn(rows, dim, generator=random).to(device, dtype)
        at = torch.tensor([position], device=device)
        kernels[1](
            keys, boundary.to(device), means, open_sum, state, unit_of, at, 2, spread
        )  # fmt: skip
        given.append(keys.float())
    stacked = torch.stack(given, dim=1)
    for row in range(rows):
        for unit in range(capacity):
            held = stacked[row, unit_of[row] == unit]
            expected = torch.tensor(7.0, device=device)
            if len(held):
                expected = held.var(dim=0, unbiased=False).mean() / 2
            found = spread.halves[row, unit]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert bool((state.count == capacity).all()) == (capacity < 40)
