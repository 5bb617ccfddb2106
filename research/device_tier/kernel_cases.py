"""Cases of `device_tier.kernels`: every kernel at the sizes of an 8B model's decode step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.device import append, attention, slots
from penstock.kernels.device.slots import FetchLists
from research.device_tier.kernel_timer import Call

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
