"""Cases of `device_tier.kernels` that select: scores, tokens, slots and boundaries."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.device import boundaries, slots, units
from penstock.kernels.device.boundaries import Leaving, UnitState
from penstock.kernels.device.slots import FetchLists
from research.device_tier.kernel_cases import DIM, Cases, Grid, KernelCase, copies
from research.device_tier.kernel_timer import Call


def selection_cases(grid: Grid, device: torch.device) -> Cases:
    """Scores of units, and tokens taken of the best, where all rows are due and where none is."""
    for rows in grid.rows:
        for capacity in grid.capacities:
            for all_due in (True, False):
                due = torch.full((rows,), all_due, device=device)
                yield _score(grid, device, rows, capacity, due)
                yield _select(grid, device, rows, capacity, due)


def _said(rows: int, capacity: int, due: Tensor) -> str:
    return f"{rows} rows x {capacity} units, {'all' if bool(due.all()) else 'none'} due"


def _state(grid: Grid, rows: int, capacity: int, device: torch.device) -> UnitState:
    """Units of equal size that are all in use."""
    state = UnitState.allocate(rows, capacity, device)
    size = grid.tokens // capacity
    state.count.fill_(capacity)
    state.sizes.fill_(size)
    state.first.copy_(size * torch.arange(capacity, device=device).expand(rows, -1))
    return state


def _score(grid: Grid, device: torch.device, rows: int, capacity: int, due: Tensor) -> KernelCase:
    state = _state(grid, rows, capacity, device)
    num_bytes = rows * capacity * (2 * DIM + 4 + 4)
    size = (copies(num_bytes), rows, capacity, DIM)
    means = torch.randn(size, device=device, dtype=torch.bfloat16)
    query = torch.randn(rows, grid.heads, DIM, device=device, dtype=torch.bfloat16)
    out = torch.zeros(rows, capacity, device=device)

    def calls(function: Callable[..., None]) -> Sequence[Call]:
        return [
            partial(function, query, mean, state.sizes, state.count, DIM**-0.5, due, out)
            for mean in means
        ]

    is_due = bool(due.all())
    return KernelCase(
        kernel="score_units", size=_said(rows, capacity, due),
        calls=calls(units.score_units), twins=calls(units.score_units_twin),
        num_bytes=num_bytes if is_due else 0, ceiling="GPU copy" if is_due else "none",
    )  # fmt: skip


def _select(grid: Grid, device: torch.device, rows: int, capacity: int, due: Tensor) -> KernelCase:
    state = _state(grid, rows, capacity, device)
    scores = torch.rand(rows, capacity, device=device)
    members = torch.rand(rows, grid.tokens, device=device).argsort(dim=1).int()
    ids = torch.zeros(rows, grid.budget, dtype=torch.int32, device=device)
    valid = torch.zeros(rows, grid.budget, dtype=torch.bool, device=device)
    given = (scores, state.first, state.sizes, state.count, members, due, ids, valid)

    def calls(function: Callable[..., None]) -> Sequence[Call]:
        return 8 * [partial(function, *given)]

    is_due = bool(due.all())
    moved = rows * (capacity * 12 + grid.budget * 9)
    return KernelCase(
        kernel="select_tokens", size=_said(rows, capacity, due),
        calls=calls(units.select_tokens), twins=calls(units.select_tokens_twin),
        num_bytes=moved if is_due else 0, ceiling="GPU copy" if is_due else "none",
    )  # fmt: skip


def slot_cases(grid: Grid, device: torch.device) -> Cases:
    """Slots for a selection of which nothing is there, of which all is there, and for no row."""
    wanted = grid.budget
    for rows in grid.rows:
        for share, due in (
            ("none of it there", True),
            ("all of it there", True),
            ("not due", False),
        ):
            yield _plan(grid, device, rows, wanted, share, due)


def _plan(
    grid: Grid, device: torch.device, rows: int, wanted: int, share: str, due: bool
) -> KernelCase:
    order = torch.rand(rows, grid.tokens, device=device).argsort(dim=1).int()
    first = order[:, :wanted].contiguous()
    other = first if share.startswith("all") else order[:, wanted : 2 * wanted].contiguous()
    valid = torch.ones_like(first, dtype=torch.bool)
    rows_due = torch.full((rows,), due, device=device)
    lists = FetchLists.allocate(rows, wanted, wanted, device)
    unit_in = torch.full((rows, wanted), -1, dtype=torch.int32, device=device)
    slot_of = torch.full((rows, grid.tokens), -1, dtype=torch.int32, device=device)
    heads = torch.zeros(rows, dtype=torch.int32, device=device)

    def calls(function: Callable[..., None]) -> Sequence[Call]:
        tables = (valid, rows_due, unit_in, slot_of, heads, lists)
        return [partial(function, chosen, *tables) for chosen in 4 * [first, other]]

    return KernelCase(
        kernel="plan_slots", size=f"{rows} rows x {wanted} wanted, {share}",
        calls=calls(slots.plan_slots), twins=calls(slots.plan_slots_twin),
    )  # fmt: skip


def boundary_cases(grid: Grid, device: torch.device) -> Cases:
    """The bookkeeping of a step: boundaries, the open segment, the token that leaves the window."""
    for rows in grid.rows:
        for begins in (False, True):
            yield _step(grid, device, rows, begins)


def _step(grid: Grid, device: torch.device, rows: int, begins: bool) -> KernelCase:
    per_sequence, capacity = grid.kv_heads, max(grid.capacities)
    sequences = rows // per_sequence
    state = UnitState.allocate(rows, capacity, device)
    query = torch.randn(rows, grid.heads, DIM, device=device, dtype=torch.bfloat16)
    previous, means = query.clone(), query.new_zeros(rows, capacity, DIM)
    known, boundary = (torch.ones(sequences, dtype=torch.bool, device=device) for _ in range(2))
    due = torch.ones(rows, dtype=torch.bool, device=device)
    last = torch.zeros(sequences, dtype=torch.int64, device=device)
    counters = torch.zeros(sequences, 3, dtype=torch.int64, device=device)
    open_sum = torch.zeros(rows, DIM, device=device)
    unit_of = torch.zeros(rows, grid.tokens, dtype=torch.int16, device=device)
    position = torch.full((1,), grid.tokens - 1, device=device)
    end = position - grid.budget
    leaving = Leaving(unit_of, state, end, state.start, end, 0)
    tau = 2.0 if begins else 0.7

    def calls(find: Callable[..., None], grow: Callable[..., None]) -> Sequence[Call]:
        def step() -> None:
            find(
                query, previous, known, last, due, boundary, position, tau=tau, stride=0,
                every=False, rows_per_sequence=per_sequence, counters=counters, leaving=leaving,
            )  # fmt: skip
            grow(query[:, 0], boundary, means, open_sum, state, unit_of, position, per_sequence)

        return 8 * [step]

    return KernelCase(
        kernel="find_boundaries, grow_units",
        size=f"{rows} rows, {'all begin' if begins else 'none begins'}",
        calls=calls(boundaries.find_boundaries, boundaries.grow_units),
        twins=calls(boundaries.find_boundaries_twin, boundaries.grow_units_twin),
    )  # fmt: skip
