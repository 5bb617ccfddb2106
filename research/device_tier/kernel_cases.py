"""What `device_tier.kernels` times: gathers, attention, units, slots, boundaries, k-means."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.device import append, attention, boundaries, slots, units
from penstock.kernels.device.boundaries import Leaving, UnitState
from penstock.kernels.device.clusters import cluster_keys
from penstock.kernels.device.slots import FetchLists
from penstock.methods.louiskv.block_clusterer import ITERATIONS, num_clusters
from penstock.methods.louiskv.device_index import DeviceUnitSizes
from penstock.models.plain_model import random_model
from penstock.models.query_projection import decoder_layers
from research.device_tier.timers import Call, new_event

# Every kernel at the sizes of an 8B model's decode step -------------------------------------------

Ceiling = Literal["pinned to GPU", "GPU to pinned", "GPU copy", "matmul", "none"]
HEAD_BYTES = 512
"""A token of one KV head: keys and values of 128 numbers of 16 bits."""
DIM = 128
COLD_BYTES, MOST_COPIES = 128 << 20, 16
"""Calls go round over so much memory that caches do not hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCase:
    """One kernel at one size: the calls, and what each of them moves or computes."""

    kernel: str
    size: str
    calls: Sequence[Call]
    twins: Sequence[Call]
    """The same work by the plain torch twin; may be empty."""
    num_bytes: int = 0
    flops: int = 0
    ceiling: Ceiling = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Sizes to measure."""

    rows: tuple[int, ...] = (8, 64)
    wanted: tuple[int, ...] = (64, 256, 1024)
    unit_bytes: tuple[int, ...] = (512, 1024, 4096, 8192, 16384)
    attention_rows: tuple[int, ...] = (8, 64, 192)
    places: int = 1344
    heads: int = 4
    """Query heads of a row."""
    capacities: tuple[int, ...] = (2048, 8192)
    tokens: int = 32768
    budget: int = 1024
    chunk: int = 2048
    """Tokens of a prefill chunk."""
    host_bytes: int = 1 << 30
    """Of the pinned memory that is gathered from."""
    cluster_blocks: tuple[int, ...] = (2048, 4096, 8192, 32768)
    kv_heads: int = 8


SMALL = Grid(
    rows=(2,), wanted=(4, 8), unit_bytes=(512, 1024), attention_rows=(2,), places=96,
    capacities=(32,), tokens=512, budget=16, chunk=32, host_bytes=1 << 18,
    cluster_blocks=(128, 512), kv_heads=2,
)  # fmt: skip
"""To see the program run."""

Cases = Iterator[KernelCase]


def copies(num_bytes: int) -> int:
    """How many calls on different memory make caches useless."""
    return max(2, min(MOST_COPIES, COLD_BYTES // max(1, num_bytes)))


def host_buffer(grid: Grid, device: torch.device) -> Tensor:
    """Memory of the host to gather from and to write to. uint8 [host_bytes]"""
    buffer = torch.empty(grid.host_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return buffer.zero_()


def gather_cases(grid: Grid, host: Tensor, device: torch.device) -> Cases:
    """Rows of units from host memory into slots."""
    for unit_bytes in grid.unit_bytes:
        for rows in grid.rows:
            for wanted in grid.wanted:
                units = min(8192, grid.host_bytes // (rows * unit_bytes))
                if units >= wanted:
                    yield from _gather(host, device, rows, wanted, unit_bytes, units)
    unit_bytes, rows = 8 * HEAD_BYTES, grid.rows[0]
    count = min(2048, grid.host_bytes // (rows * unit_bytes))
    there = host[: rows * count * unit_bytes].view(rows, count, unit_bytes)
    out = torch.empty(rows, count, unit_bytes, dtype=torch.uint8, device=device)
    yield KernelCase(
        kernel="gather_range", size=f"{rows} rows x {count} units of {unit_bytes} B",
        calls=[partial(slots.gather_range, there, out, 0, count)], twins=[],
        num_bytes=rows * count * unit_bytes, ceiling="pinned to GPU",
    )  # fmt: skip


def _gather(
    host: Tensor, device: torch.device, rows: int, wanted: int, unit_bytes: int, units: int
) -> Cases:
    """By programs that fill the device, and by the few that leave room for other work."""
    group = max(1, unit_bytes // HEAD_BYTES)
    there = host[: rows * units * unit_bytes].view(rows, units, unit_bytes)
    pool = torch.zeros(rows, wanted, unit_bytes, dtype=torch.uint8, device=device)
    mask = torch.zeros(rows, wanted * group, dtype=torch.bfloat16, device=device)
    start = torch.zeros(rows, dtype=torch.int32, device=device)
    moved = rows * wanted * unit_bytes

    def calls(function: Callable[..., None]) -> list[Call]:
        return [partial(function, there, pool, mask, start, lists, group) for lists in every]

    every = [_lists(rows, wanted, units, device) for _ in range(copies(moved))]
    size = f"{rows} rows x {wanted} units of {unit_bytes} B"
    for name, function in (
        ("gather_units", slots.gather_units),
        ("gather_units beside", partial(slots.gather_units, leaves_room=True)),
    ):
        yield KernelCase(
            kernel=name, size=size, calls=calls(function),
            twins=calls(slots.gather_units_twin), num_bytes=moved, ceiling="pinned to GPU",
        )  # fmt: skip


def _lists(rows: int, wanted: int, units: int, device: torch.device) -> FetchLists:
    """Lists of random units for the slots in order."""
    lists = FetchLists.allocate(rows, wanted, wanted, device)
    lists.units.copy_(torch.rand(rows, units, device=device).argsort(dim=1)[:, :wanted])
    lists.slots.copy_(torch.arange(wanted, device=device).expand(rows, -1))
    lists.counts.fill_(wanted)
    return lists


def append_cases(grid: Grid, host: Tensor, device: torch.device) -> Cases:
    """New tokens to host memory: a prefill chunk, and one token of a step."""
    for rows in grid.rows:
        size = (rows, 1, grid.chunk, DIM)
        keys = torch.randn(size, device=device).to(torch.bfloat16)
        moved = rows * grid.chunk * HEAD_BYTES
        there = host[:moved].view(torch.bfloat16).view(rows, grid.chunk, 2, 1, DIM)
        yield KernelCase(
            kernel="store_tokens", size=f"{rows} rows x {grid.chunk} tokens",
            calls=[partial(append.store_tokens, keys, keys, there, 0)],
            twins=[partial(append.store_tokens_twin, keys, keys, there, 0)],
            num_bytes=moved, ceiling="GPU to pinned",
        )  # fmt: skip
    for rows in grid.attention_rows:
        tokens = min(1024, grid.host_bytes // (rows * HEAD_BYTES))
        there = host[: rows * tokens * HEAD_BYTES].view(torch.bfloat16)
        there = there.view(rows, tokens, 2, 1, DIM)
        new = torch.randn(rows, 1, DIM, device=device).to(torch.bfloat16)
        window = torch.zeros(rows, 320, 2, 1, DIM, dtype=torch.bfloat16, device=device)
        mask = torch.zeros(rows, 320, dtype=torch.bfloat16, device=device)
        position = torch.full((1,), tokens - 1, device=device)
        start = torch.zeros(rows, dtype=torch.int32, device=device)

        given = (new, new, there, window, mask, position, start)
        sizes: dict[str, Any] = {"sink_places": 64, "window_slots": 256, "group_tokens": 1}

        yield KernelCase(
            kernel="append_token", size=f"{rows} rows", num_bytes=rows * HEAD_BYTES,
            calls=8 * [partial(append.append_token, *given, **sizes)],
            twins=8 * [partial(append.append_token_twin, *given, **sizes)],
        )  # fmt: skip


def attention_cases(grid: Grid, device: torch.device) -> Cases:
    """One query a row over a pool."""
    for rows in grid.attention_rows:
        num_bytes = rows * grid.places * HEAD_BYTES
        size = (copies(num_bytes), rows, grid.places, 2, 1, DIM)
        pools = torch.randn(size, device=device, dtype=torch.bfloat16)
        mask = torch.zeros(rows, grid.places, dtype=torch.bfloat16, device=device)
        query = torch.randn(rows, grid.heads, DIM, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(query)
        given = [(pool, mask, DIM**-0.5, out) for pool in pools]
        yield KernelCase(
            kernel="pool_attention", size=f"{rows} rows x {grid.places} places",
            calls=[partial(attention.pool_attention, query, *one) for one in given],
            twins=[partial(attention.pool_attention_twin, query, *one) for one in given],
            num_bytes=num_bytes, ceiling="GPU copy",
        )  # fmt: skip


# Scores, tokens, slots and boundaries -------------------------------------------------------------


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


# K-means of a prompt beside the prefill of the same prompt ----------------------------------------

CLUSTER_TOKENS = 16
KMEANS = "kmeans"


def cluster_cases(grid: Grid, device: torch.device) -> Cases:
    """A layer's prompt keys into clusters, as a whole or block after block."""
    rows = grid.kv_heads
    points = torch.randn(rows, grid.tokens, DIM, device=device).to(torch.bfloat16)
    for block in grid.cluster_blocks:
        clusters = num_clusters(block, CLUSTER_TOKENS)
        sizes = DeviceUnitSizes(cluster_tokens=CLUSTER_TOKENS, block_tokens=block, spare_units=0)

        def cluster(block: int = block, clusters: int = clusters, sizes: Any = sizes) -> None:
            blocks = points.view(rows, -1, block, DIM)
            for part in torch.split(
                blocks, sizes.blocks_together(rows), dim=1
            ):  # as the index does
                cluster_keys(
                    part, clusters, iterations=ITERATIONS, cosine=False, seed=0,
                    elements=sizes.elements(rows),
                )  # fmt: skip

        products = 2 * rows * grid.tokens * clusters * DIM * (ITERATIONS + 1)
        yield KernelCase(
            kernel=KMEANS, size=f"{rows} heads x {grid.tokens} keys, blocks of {block}",
            calls=[cluster],
            twins=[cluster] if block == grid.cluster_blocks[0] else [], flops=products,
            ceiling="matmul",
        )  # fmt: skip


def prefill_layer_s(config: str, tokens: int, device: torch.device, seed: int = 0) -> float:
    """Seconds of one layer in a prefill of `tokens` tokens in one pass, without a cache.

    Of the second of two layers, the faster of two passes after a first one.
    """
    model: Any = random_model(config, max_positions=tokens, device=device, seed=seed, layers=2)
    layer = decoder_layers(model)[1]
    marks: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: marks.append(_now(device))),
        layer.register_forward_hook(lambda *_: marks.append(_now(device))),
    ]
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    if device.type == "cuda":
        torch.cuda.synchronize()
    pairs = list(zip(marks[::2], marks[1::2], strict=True))[1:]
    return min(_between(a, b) for a, b in pairs)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = new_event()
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1e3
