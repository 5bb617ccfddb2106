"""Segments of the answer on the device: both forms against the host engine and a plain loop."""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.device import boundaries as public
from penstock.kernels.device.boundaries import Leaving, UnitSpread, UnitState
from penstock.methods.louiskv.semantic_boundaries import SemanticBoundaries

Form = ModuleType | SimpleNamespace


@pytest.fixture(params=["torch", "triton"])
def form(request: pytest.FixtureRequest) -> Iterator[Form]:
    """Both functions in one of their forms."""
    if request.param == "torch":
        yield SimpleNamespace(
            find_boundaries=public.find_boundaries_twin,
            grow_units=public.grow_units_twin,
        )
    else:
        request.getfixturevalue("triton")
        from penstock.kernels.device import boundaries_triton

        yield boundaries_triton


class Finder:
    """The tensors of `find_boundaries`, filled with what must not matter."""

    def __init__(
        self, sequences: int, rows_per_sequence: int, heads: int, dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        rows = sequences * rows_per_sequence
        self.rows_per_sequence, self.device = rows_per_sequence, device
        self.previous = torch.full((rows, heads, dim), torch.nan, dtype=dtype, device=device)
        self.known = torch.zeros(sequences, dtype=torch.bool, device=device)
        self.last = torch.full((sequences,), 10**6, dtype=torch.int64, device=device)
        self.due_rows = torch.zeros(rows, dtype=torch.bool, device=device)
        self.boundary = torch.zeros(sequences, dtype=torch.bool, device=device)
        self.counters = torch.zeros(sequences, 3, dtype=torch.int64, device=device)

    def step(
        self, form: Form, query: Tensor, position: int, *, tau: float = 0.0, stride: int = 0,
        every: bool = False, leaving: Leaving | None = None,
    ) -> list[bool]:  # fmt: skip
        form.find_boundaries(
            query, self.previous, self.known, self.last, self.due_rows, self.boundary,
            torch.tensor([position], device=self.device), tau=tau, stride=stride, every=every,
            rows_per_sequence=self.rows_per_sequence, counters=self.counters, leaving=leaving,
        )  # fmt: skip
        return [bool(cut) for cut in self.boundary.tolist()]


@pytest.mark.parametrize(
    ("sequences", "rows_per_sequence", "heads", "dim", "dtype", "stride"),
    [
        (3, 2, 4, 32, torch.bfloat16, 0),
        (2, 3, 1, 24, torch.float32, 0),
        (1, 4, 3, 16, torch.float16, 0),
        (4, 1, 8, 64, torch.float32, 3),
        (1, 2, 2, 16, torch.bfloat16, 1),
    ],
)
def test_boundaries_are_the_hosts(
    form: Form, device: torch.device, sequences: int, rows_per_sequence: int, heads: int, dim: int,
    dtype: torch.dtype, stride: int,
) -> None:  # fmt: skip
    """Queries wander about so that their similarity falls on either side of tau."""
    torch.manual_seed(0)
    shape = KVShape(num_layers=1, num_query_heads=heads, num_kv_heads=1, head_dim=dim, dtype=dtype)
    rows = sequences * rows_per_sequence
    host = SemanticBoundaries(
        shape, rows=rows, rows_per_sequence=rows_per_sequence, tau=0.8, stride=stride,
        device=device,
    )  # fmt: skip
    finder = Finder(sequences, rows_per_sequence, heads, dim, dtype, device)
    walk = torch.randn(rows, heads, dim)
    cuts = torch.zeros(sequences, dtype=torch.int64)
    for position in range(50, 70):
        kept = (1 - 0.4 * torch.rand(sequences)).repeat_interleave(rows_per_sequence)
        kept = kept[:, None, None]
        walk = kept * walk + (1 - kept.square()).sqrt() * torch.randn(rows, heads, dim)
        # Heads of a row lie inside a wider tensor, as the projection leaves them.
        query = walk.repeat(1, 1, 2).to(device, dtype)[..., :dim]
        expected = host.decide(query, position).tolist()
        assert finder.step(form, query, position, tau=0.8, stride=stride) == expected
        cuts += torch.tensor(expected)
        spread = [cut for cut in expected for _ in range(rows_per_sequence)]
        assert finder.due_rows.tolist() == spread
        assert torch.equal(finder.previous, query)
        assert bool(finder.known.all())
    assert finder.counters.tolist() == [[20, int(cut), int(cut)] for cut in cuts]
    assert finder.last.tolist() == host._last.tolist()
    if stride == 0:
        assert int(cuts.min()) >= 2
        assert int(cuts.max()) <= 18


def test_first_steps_and_every_step(form: Form, device: torch.device) -> None:
    """A sequence whose past was forgotten begins anew; with `every` all rows retrieve."""
    finder = Finder(2, 2, 1, 16, torch.float32, device)
    query = torch.ones(4, 1, 16, device=device)
    assert finder.step(form, query, 7, tau=0.5, every=True) == [True, True]
    assert finder.step(form, query, 8, tau=0.5, every=True) == [False, False]
    assert finder.due_rows.tolist() == [True] * 4
    finder.known[1] = False
    assert finder.step(form, query, 9, tau=0.5) == [False, True]
    assert finder.due_rows.tolist() == [False, False, True, True]
    assert finder.last.tolist() == [7, 9]
    assert finder.counters.tolist() == [[3, 1, 2], [3, 2, 3]]


def test_a_query_of_zeros_is_like_nothing(form: Form, device: torch.device) -> None:
    finder = Finder(1, 2, 1, 16, torch.float32, device)
    finder.step(form, torch.ones(2, 1, 16, device=device), 0)
    half = torch.ones(2, 1, 16, device=device)
    half[1] = 0.0
    assert finder.step(form, half, 1, tau=0.45) == [False]
    assert finder.step(form, half, 2, tau=0.55) == [True]


def leave(form: Form, unit_of: Tensor, state: UnitState, end: int, sequences: int) -> list[bool]:
    """The token at `end` leaves the window; gives what rows retrieve beside those of a boundary.

    Three tokens may be taken of a row that begins at 0; rows begin where their padding ends.
    """
    rows, device = len(unit_of), unit_of.device
    finder = Finder(sequences, rows // sequences, 1, 16, torch.float32, device)
    query = torch.ones(rows, 1, 16, device=device)
    finder.previous.copy_(query)
    finder.known.fill_(True)
    leaving = Leaving(
        unit_of, state, torch.tensor([end], device=device), state.start,
        torch.tensor([3], device=device), 1,
    )  # fmt: skip
    assert finder.step(form, query, 1, tau=0.5, leaving=leaving) == [False] * sequences
    assert finder.counters.tolist() == [[1, 0, 0]] * sequences
    return [bool(due) for due in finder.due_rows.tolist()]


class Loop:
    """One row, as the words of `grow_units` and `Leaving` say, with lists."""

    def __init__(self, clusters: int, capacity: int, start: int) -> None:
        self.units: list[dict[str, object]] = [{"cluster": True} for _ in range(clusters)]
        self.capacity, self.start, self.open = capacity, start, False
        self.unit_of: dict[int, int] = {}
        self.keys: list[list[Tensor]] = [[] for _ in range(clusters)]
        self.first: dict[int, int] = {}
        self.sizes: dict[int, int] = dict.fromkeys(range(clusters), 0)

    def grow(self, key: Tensor, cut: bool, position: int) -> None:
        if (cut or not self.open) and len(self.keys) < self.capacity:
            self.first[len(self.keys)] = max(position, self.start)
            self.sizes[len(self.keys)] = 0
            self.keys.append([])
            self.open = True
        self.unit_of[position] = -1
        if self.open:
            self.unit_of[position] = len(self.keys) - 1
            self.keys[-1].append(key)

    def leave(self, end: int) -> None:
        unit = self.unit_of.get(end, 0)
        if end >= self.start and unit >= 0:
            self.sizes[unit] += 1


@pytest.mark.parametrize(
    ("capacity", "clusters", "dim", "dtype", "id_dtype"),
    [
        (40, 0, 16, torch.float32, torch.int16),
        (5, 3, 24, torch.float16, torch.int16),
        (3, 3, 8, torch.bfloat16, torch.int32),
    ],
)
def test_units_grow_as_a_loop_says(
    form: Form, device: torch.device, capacity: int, clusters: int, dim: int, dtype: torch.dtype,
    id_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Two sequences of two rows; padding, sinks, a window of 4, tables that fill up or are full."""
    random = torch.Generator().manual_seed(capacity)
    rows, prompt, tokens, window = 4, 6, 30, 4
    state = UnitState.allocate(rows, capacity, device)
    starts = [2, 2, 8, 8]
    state.start.copy_(torch.tensor(starts))
    state.count.fill_(clusters)
    state.first.fill_(-7)
    state.sizes[:, clusters:] = 99
    means = torch.full((rows, capacity, dim), 5.0, dtype=dtype, device=device)
    open_sum = torch.full((rows, dim), 3.0, device=device)
    unit_of = torch.full((rows, tokens), 0 if clusters else -1, dtype=id_dtype, device=device)
    loops = [Loop(clusters, capacity, start) for start in starts]
    for loop in loops:
        loop.unit_of = dict.fromkeys(range(prompt), 0 if clusters else -1)
    for position in range(prompt, tokens):
        boundary = torch.rand(2, generator=random) < 0.4
        keys = torch.randn(rows, 2, dim, generator=random).to(device, dtype)[:, 1]
        at = torch.tensor([position], device=device)
        form.grow_units(keys, boundary.to(device), means, open_sum, state, unit_of, at, 2)
        few = leave(form, unit_of, state, position - prompt - window, 2)
        assert few == [3 - start <= 1 for start in starts]
        for row, loop in enumerate(loops):
            loop.grow(keys[row].cpu().float(), bool(boundary[row // 2]), position)
            loop.leave(position - prompt - window)
    for row, loop in enumerate(loops):
        used = len(loop.keys)
        assert int(state.count[row]) == used
        assert int(state.open_tokens[row]) == (len(loop.keys[-1]) if loop.open else 0)
        assert state.sizes[row, :used].tolist() == [loop.sizes[unit] for unit in range(used)]
        assert unit_of[row].tolist() == [loop.unit_of[position] for position in range(tokens)]
        for unit in range(capacity):
            expected = torch.full((dim,), 5.0)
            if unit < used and loop.keys[unit]:
                assert int(state.first[row, unit]) == loop.first[unit]
                expected = torch.stack(loop.keys[unit]).mean(dim=0)
            else:
                assert int(state.first[row, unit]) == -7
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                means[row, unit].cpu().float(), expected, atol=tolerance, rtol=tolerance
            )
    if capacity == 40:
        assert int(state.count.min()) > 5
    else:
        assert bool((state.count == capacity).all())


@pytest.mark.parametrize(
    ("capacity", "clusters", "dim", "dtype"),
    [(40, 0, 16, torch.float32), (12, 3, 24, torch.bfloat16), (3, 3, 8, torch.float32)],
)
def test_a_segments_spread_is_that_of_its_keys(
    form: Form, device: torch.device, capacity: int, clusters: int, dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Two sequences of two rows; in tables that fill up the last segment goes on, in full ones
    none begins."""
    random, rows, tokens = torch.Generator().manual_seed(capacity), 4, 30
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
        form.grow_units(
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


def test_nothing_has_left(form: Form, device: torch.device) -> None:
    """A negative end and padding change no size; segments that begin in the padding are empty."""
    state = UnitState.allocate(40, 3, device)
    state.start.fill_(2)
    means, open_sum = torch.zeros(40, 3, 16, device=device), torch.zeros(40, 16, device=device)
    unit_of = torch.zeros(40, 5, dtype=torch.int16, device=device)
    boundary = torch.ones(10, dtype=torch.bool, device=device)
    keys = torch.randn(40, 16, device=device)
    for position in range(3):
        at = torch.tensor([position], device=device)
        form.grow_units(keys, boundary, means, open_sum, state, unit_of, at, 4)
    assert state.first.tolist() == [[2, 2, 2]] * 40
    assert unit_of.tolist() == [[0, 1, 2, 0, 0]] * 40
    for end in (-3, 1):
        leave(form, unit_of, state, end, 10)
    assert not state.sizes.any()
    leave(form, unit_of, state, 2, 10)
    assert state.sizes.tolist() == [[0, 0, 1]] * 40


def test_rows_with_few_tokens_retrieve(form: Form, device: torch.device) -> None:
    """Rows apart, also where their sequence has no boundary; a token that is in no unit."""
    state = UnitState.allocate(4, 3, device)
    state.start.copy_(torch.tensor([0, 1, 2, 3]))
    unit_of = torch.tensor([[0, 2, 1, -1]], dtype=torch.int32, device=device).repeat(4, 1)
    assert leave(form, unit_of, state, 1, 2) == [False, False, True, True]
    assert state.sizes.tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    leave(form, unit_of, state, 3, 2)
    assert int(state.sizes.sum()) == 2


def test_public_functions_choose_a_form(device: torch.device) -> None:
    finder = Finder(1, 2, 2, 16, torch.float32, device)
    query = torch.randn(2, 2, 16, device=device)
    assert finder.step(public, query, 3, tau=0.5) == [True]
    assert finder.step(public, query, 4, tau=0.5) == [False]
    state = UnitState.allocate(2, 4, device)
    assert state.capacity == 4
    means, open_sum = torch.zeros(2, 4, 16, device=device), torch.zeros(2, 16, device=device)
    unit_of = torch.zeros(2, 5, dtype=torch.int16, device=device)
    at = torch.tensor([4], device=device)
    public.grow_units(query[:, 0], finder.boundary, means, open_sum, state, unit_of, at, 2)
    leave(public, unit_of, state, 4, 1)
    assert torch.equal(means[:, 0], query[:, 0])
    assert state.sizes.tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_step_can_be_captured(form: Form, device: torch.device) -> None:
    """Replays of one graph, with positions and queries that change, are the calls."""

    def life(captured: bool) -> tuple[list[list[bool]], UnitState, Tensor]:
        torch.manual_seed(5)
        finder, state = Finder(2, 2, 2, 32, torch.float32, device), UnitState.allocate(4, 9, device)
        means, open_sum = torch.zeros(4, 9, 32, device=device), torch.zeros(4, 32, device=device)
        unit_of = torch.zeros(4, 40, dtype=torch.int16, device=device)
        query = torch.randn(4, 2, 32, device=device)
        at = torch.zeros(1, dtype=torch.int64, device=device)

        def step() -> None:
            form.find_boundaries(
                query, finder.previous, finder.known, finder.last, finder.due_rows,
                finder.boundary, at, tau=0.8, stride=0, every=False, rows_per_sequence=2,
                counters=finder.counters,
                leaving=Leaving(unit_of, state, at - 4, state.start, at - 4, 0),
            )  # fmt: skip
            form.grow_units(query[:, 1], finder.boundary, means, open_sum, state, unit_of, at, 2)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        cuts = []
        for position in range(1, 20):
            at.fill_(position)
            query.add_(torch.randn_like(query), alpha=0.5)
            graph.replay() if captured else step()
            cuts.append(finder.boundary.tolist())
        return cuts, state, means

    replayed, called = life(True), life(False)
    assert replayed[0] == called[0]
    assert torch.equal(replayed[1].sizes, called[1].sizes)
    assert torch.equal(replayed[1].count, called[1].count)
    assert torch.equal(replayed[2], called[2])
