"""plan_slots() and gather_units() in Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.device.slots import FetchLists
from penstock.kernels.slot_codes import coded_token_bytes

_TILE_WORDS = 512
"""Words of 8 bytes that are copied at a time: 4 KiB, so that short lists still fill the device."""
_PROGRAMS = 2048
"""Programs beyond which each copies several tiles: where nothing is listed, they are what a step
costs, and a link is full with far fewer."""
_MOST_TILES = 16
_STAYING_PROGRAMS = 8
_STAYING_WORDS = 8192
_STAYING_WARPS = 32
"""Programs that copy everything beside other work, words of 8 bytes that each copies at a time, and
its warps. Few and large ones: a product of a batch of 32 wants 112 or 128 of an H100's 132
multiprocessors at once, and a program that waits for the link keeps one of them. Of such steps of
11.2 ms 4 programs cost 0.2 ms more, 16 of 16 KiB likewise, and 64 of them, tile by tile, 0.6
(research/notes/2026-11-25-what-a-step-waits-for.md)."""

_TILE_NUMBERS, _STAYING_NUMBERS = 2048, 16384
"""Numbers that become codes at a time, in the former kind of program and in the latter."""


@triton.jit
def _plan(
    wanted_ptr, valid_ptr, due_ptr, unit_in_ptr, slot_of_ptr, heads_ptr,
    units_ptr, slots_ptr, counts_ptr, traffic_ptr, pinned_ptr,
    width, num_slots, num_units,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(due_ptr + row) == 0:
        tl.store(counts_ptr + row, 0)
        return
    column = tl.arange(0, WIDTH)
    in_list = column < width
    unit = tl.load(wanted_ptr + row * width + column, mask=in_list, other=0)
    real = tl.load(valid_ptr + row * width + column, mask=in_list, other=0) != 0
    slot_of_ptr += row * num_units
    slot = tl.load(slot_of_ptr + unit, mask=in_list, other=-1)
    missing = real & (slot < 0)
    count = tl.sum(missing.to(tl.int32), 0)

    place = tl.arange(0, SLOTS)
    in_table = place < num_slots
    pinned_ptr += row * num_slots
    tl.store(pinned_ptr + place, tl.zeros((SLOTS,), tl.int32), mask=in_table)
    tl.debug_barrier()
    tl.store(pinned_ptr + slot, tl.full((WIDTH,), 1, tl.int32), mask=in_list & (slot >= 0))
    tl.debug_barrier()

    # The slots in the order of the hand; the first `count` free ones are taken.
    head = tl.load(heads_ptr + row)
    order = head + place
    order = tl.where(order >= num_slots, order - num_slots, order)
    free = in_table & (tl.load(pinned_ptr + order, mask=in_table, other=1) == 0)
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    chosen = free & (rank < count)
    nth = tl.cumsum(missing.to(tl.int32), 0) - 1
    tl.store(units_ptr + row * width + nth, unit, mask=missing)
    tl.store(slots_ptr + row * width + rank, order, mask=chosen)

    unit_in_ptr += row * num_slots
    former = tl.load(unit_in_ptr + order, mask=chosen, other=-1)
    tl.store(slot_of_ptr + former, tl.full((SLOTS,), -1, tl.int32), mask=chosen & (former >= 0))
    tl.debug_barrier()  # the list of units is read back in the order of the slots
    entering = tl.load(units_ptr + row * width + rank, mask=chosen, other=0)
    tl.store(unit_in_ptr + order, entering, mask=chosen)
    tl.store(slot_of_ptr + entering, order, mask=chosen)

    head += tl.max(tl.where(chosen, place + 1, 0), 0)
    tl.store(heads_ptr + row, tl.where(head >= num_slots, head - num_slots, head))
    tl.store(counts_ptr + row, count)
    traffic_ptr += 2 * row
    tl.store(traffic_ptr, tl.load(traffic_ptr) + tl.sum(real.to(tl.int64), 0))
    tl.store(traffic_ptr + 1, tl.load(traffic_ptr + 1) + count)


def plan_slots_triton(
    wanted: Tensor,
    valid: Tensor,
    due: Tensor,
    unit_in: Tensor,
    slot_of: Tensor,
    heads: Tensor,
    lists: FetchLists,
) -> None:
    """One program per row; see `slots.plan_slots`. Every tensor is contiguous."""
    rows, width = wanted.shape
    num_slots, num_units = unit_in.shape[1], slot_of.shape[1]
    tables = (wanted, valid, due, unit_in, slot_of, heads)
    assert all(table.is_contiguous() for table in tables)
    widest = max(width, num_slots)
    _plan[(rows,)](
        wanted, valid.view(torch.uint8), due.view(torch.uint8), unit_in, slot_of, heads,
        lists.units, lists.slots, lists.counts, lists.traffic, lists.pinned,
        width, num_slots, num_units,
        WIDTH=triton.next_power_of_2(width), SLOTS=triton.next_power_of_2(num_slots),
        num_warps=4 if widest <= 512 else 8 if widest <= 2048 else 16,
    )  # fmt: skip


@triton.jit
def _read_tile(
    host_ptr, units_ptr, slots_ptr, row, entry, count, chunk, width, host_row_words,
    WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Chunk `chunk` of some of a row's entries: which of them are listed, their units and slots,
    and what is to be copied."""
    word = chunk * CHUNK + tl.arange(0, CHUNK)
    listed = entry < count
    unit = tl.load(units_ptr + row * width + entry, mask=listed, other=0)
    slot = tl.load(slots_ptr + row * width + entry, mask=listed, other=0)
    whole = listed[:, None] & (word < WORDS)[None, :]
    source = row * host_row_words + unit.to(tl.int64)[:, None] * WORDS + word[None, :]
    words = tl.load(host_ptr + source, mask=whole, eviction_policy="evict_first")
    return listed, unit, slot, words


@triton.jit
def _show(
    mask_ptr, start_ptr, row, listed, unit, slot, mask_row,
    UNIT: tl.constexpr, UNIT_WIDE: tl.constexpr,
):  # fmt: skip
    """Set the mask of the tokens of some units."""
    offset = tl.arange(0, UNIT_WIDE)
    position = unit[:, None] * UNIT + offset[None, :]
    place = slot[:, None] * UNIT + offset[None, :]
    shown = tl.where(position >= tl.load(start_ptr + row), 0.0, -float("inf"))
    tl.store(
        mask_ptr + row * mask_row + place,
        shown.to(mask_ptr.dtype.element_ty),
        mask=listed[:, None] & (offset < UNIT)[None, :],
    )


@triton.jit
def _write_tile(
    pool_ptr, mask_ptr, start_ptr, row, chunk, listed, unit, slot, words, pool_row_words, mask_row,
    WORDS: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr, UNIT_WIDE: tl.constexpr,
):  # fmt: skip
    """Put a tile into its slots; with the first chunk, the mask of their tokens."""
    word = chunk * CHUNK + tl.arange(0, CHUNK)
    target = row * pool_row_words + slot.to(tl.int64)[:, None] * WORDS + word[None, :]
    tl.store(pool_ptr + target, words, mask=listed[:, None] & (word < WORDS)[None, :])
    if chunk == 0:
        _show(mask_ptr, start_ptr, row, listed, unit, slot, mask_row, UNIT, UNIT_WIDE)


@triton.jit
def _gather(
    host_ptr, pool_ptr, mask_ptr, start_ptr, units_ptr, slots_ptr, counts_ptr,
    width, host_row_words, pool_row_words, mask_row,
    WORDS: tl.constexpr, CHUNK: tl.constexpr, ENTRIES: tl.constexpr,
    UNIT: tl.constexpr, UNIT_WIDE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + row)
    if tl.program_id(0) * ENTRIES >= count:
        return
    for tile in range(TILES):
        entry = (tile * tl.num_programs(0) + tl.program_id(0)) * ENTRIES + tl.arange(0, ENTRIES)
        chunk = tl.program_id(2)
        listed, unit, slot, words = _read_tile(
            host_ptr, units_ptr, slots_ptr, row, entry, count, chunk, width, host_row_words,
            WORDS, CHUNK,
        )  # fmt: skip
        _write_tile(
            pool_ptr, mask_ptr, start_ptr, row, chunk, listed, unit, slot, words, pool_row_words,
            mask_row, WORDS, CHUNK, UNIT, UNIT_WIDE,
        )  # fmt: skip


@triton.jit
def _spot(ends, tile, rows, CHUNKS: tl.constexpr, ENTRIES: tl.constexpr):
    """Where a tile of all that is listed lies: its row, entries and chunk."""
    over = ends <= tile
    row = tl.minimum(tl.sum(over.to(tl.int32), 0), rows - 1).to(tl.int64)
    of_row = tile - tl.max(tl.where(over, ends, 0), 0)
    return row, of_row // CHUNKS * ENTRIES + tl.arange(0, ENTRIES), of_row % CHUNKS


@triton.jit
def _gather_staying(
    host_ptr, pool_ptr, mask_ptr, start_ptr, units_ptr, slots_ptr, counts_ptr,
    rows, width, host_row_words, pool_row_words, mask_row,
    ROWS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    ENTRIES: tl.constexpr, UNIT: tl.constexpr, UNIT_WIDE: tl.constexpr,
):  # fmt: skip
    """Program p of P copies tiles p, p + P, ... of all rows' lists. It loads the next tile while it
    puts one into its slots."""
    each = tl.arange(0, ROWS)
    counts = tl.load(counts_ptr + each, mask=each < rows, other=0)
    tiles = (counts + ENTRIES - 1) // ENTRIES * CHUNKS
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tile = tl.program_id(0)
    row, entry, chunk = _spot(ends, tile, rows, CHUNKS, ENTRIES)
    count = tl.where(tile < total, tl.load(counts_ptr + row), 0)
    listed, unit, slot, words = _read_tile(
        host_ptr, units_ptr, slots_ptr, row, entry, count, chunk, width, host_row_words,
        WORDS, CHUNK,
    )  # fmt: skip
    while tile < total:
        tile += tl.num_programs(0)
        next_row, entry, next_chunk = _spot(ends, tile, rows, CHUNKS, ENTRIES)
        count = tl.where(tile < total, tl.load(counts_ptr + next_row), 0)
        next_listed, next_unit, next_slot, next_words = _read_tile(
            host_ptr, units_ptr, slots_ptr, next_row, entry, count, next_chunk, width,
            host_row_words, WORDS, CHUNK,
        )  # fmt: skip
        _write_tile(
            pool_ptr, mask_ptr, start_ptr, row, chunk, listed, unit, slot, words, pool_row_words,
            mask_row, WORDS, CHUNK, UNIT, UNIT_WIDE,
        )  # fmt: skip
        row, chunk, listed, unit = next_row, next_chunk, next_listed, next_unit
        slot, words = next_slot, next_words


@triton.jit
def _gather_coded(
    host_ptr, codes_ptr, scales_ptr, mask_ptr, start_ptr, units_ptr, slots_ptr, counts_ptr,
    rows, width, host_row, codes_row, mask_row,
    ROWS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, DIM_WIDE: tl.constexpr,
    LINES: tl.constexpr, CHUNKS: tl.constexpr, ENTRIES: tl.constexpr,
    UNIT: tl.constexpr, UNIT_WIDE: tl.constexpr,
):  # fmt: skip
    """Program p of P codes tiles p, p + P, ... of all rows' lists; a line is a head of a token's
    keys or values, and has one scale. The bits are those of `slot_codes.codes_of`."""
    each = tl.arange(0, ROWS)
    counts = tl.load(counts_ptr + each, mask=each < rows, other=0)
    tiles = (counts + ENTRIES - 1) // ENTRIES * CHUNKS
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    dim = tl.arange(0, DIM_WIDE)[None, None, :]
    tile = tl.program_id(0)
    while tile < total:
        row, entry, chunk = _spot(ends, tile, rows, CHUNKS, ENTRIES)
        listed = entry < tl.load(counts_ptr + row)
        unit = tl.load(units_ptr + row * width + entry, mask=listed, other=0)
        slot = tl.load(slots_ptr + row * width + entry, mask=listed, other=0)
        line = chunk * LINES + tl.arange(0, LINES)
        inside = listed[:, None] & (line < UNIT * PARTS)[None, :]
        whole = inside[:, :, None] & (dim < DIM)
        source = unit.to(tl.int64)[:, None] * (UNIT * PARTS * DIM) + line[None, :] * DIM
        source = row * host_row + source[:, :, None] + dim
        numbers = tl.load(
            host_ptr + source, mask=whole, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)

        # Numbers without their sign are in the order of their bits; the last are not finite.
        largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
        finite = largest < 0x7F800000
        largest = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
        numbers = tl.where(finite[:, :, None], numbers, 0.0)
        largest = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
        bits = (largest.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = bits.to(tl.float32, bitcast=True)
        bits = tl.where(finite, bits, 0x7FC00000)
        scale = tl.where(scale == 0.0, 1.0, scale)[:, :, None]
        codes = tl.div_rn(numbers, tl.broadcast_to(scale, numbers.shape))
        # Halves go to the even neighbour by an addend whose last bit is one.
        codes = (codes + 12582912.0) - 12582912.0
        codes = tl.where(finite[:, :, None], codes, -128.0).to(tl.int8)

        token, part = line // PARTS, line % PARTS
        there = slot.to(tl.int64)[:, None] * UNIT + token[None, :]
        there = row * codes_row + there * (PARTS * (DIM + 2))
        scales = there // 2 + PARTS * DIM // 2 + part[None, :]
        there += (part * DIM)[None, :]
        tl.store(codes_ptr + there[:, :, None] + dim, codes, mask=whole)
        tl.store(scales_ptr + scales, (bits >> 16).to(tl.int16), mask=inside)
        if chunk == 0:
            _show(mask_ptr, start_ptr, row, listed, unit, slot, mask_row, UNIT, UNIT_WIDE)
        tile += tl.num_programs(0)


def _gather_coded_units(
    host: Tensor,
    pool: Tensor,
    mask: Tensor,
    start: Tensor,
    lists: FetchLists,
    group_tokens: int,
    coded: KVShape,
    *,
    leaves_room: bool,
) -> None:
    """Launch `_gather_coded`."""
    rows, width = lists.units.shape
    source, dim, parts = host.view(coded.dtype), coded.head_dim, 2 * coded.num_kv_heads
    slot_bytes = group_tokens * coded_token_bytes(coded.num_kv_heads, dim)
    assert source.stride(1) == group_tokens * parts * dim
    assert pool.stride(1) == pool.shape[2] == slot_bytes
    assert source.stride(2) == pool.stride(2) == mask.stride(1) == 1
    wide = triton.next_power_of_2(dim)
    tile_lines = max(1, (_STAYING_NUMBERS if leaves_room else _TILE_NUMBERS) // wide)
    lines = min(triton.next_power_of_2(group_tokens * parts), tile_lines)
    entries = max(1, min(tile_lines // lines, triton.next_power_of_2(width)))
    chunks = triton.cdiv(group_tokens * parts, lines)
    tiles = triton.cdiv(width, entries) * rows * chunks
    most = _STAYING_PROGRAMS if leaves_room else _PROGRAMS
    _gather_coded[(min(most, tiles),)](
        source, pool.view(torch.int8), pool.view(torch.int16), mask, start,
        lists.units, lists.slots, lists.counts,
        rows, width, source.stride(0), pool.stride(0), mask.stride(0),
        ROWS=triton.next_power_of_2(rows), PARTS=parts, DIM=dim, DIM_WIDE=wide,
        LINES=lines, CHUNKS=chunks, ENTRIES=entries,
        UNIT=group_tokens, UNIT_WIDE=triton.next_power_of_2(group_tokens),
        num_warps=_STAYING_WARPS if leaves_room else 4,
    )  # fmt: skip


def gather_units_triton(
    host: Tensor,
    pool: Tensor,
    mask: Tensor,
    start: Tensor,
    lists: FetchLists,
    group_tokens: int,
    *,
    leaves_room: bool = False,
    coded: KVShape | None = None,
) -> None:
    """A program per tile of 4 KiB, or for some of them; a few that stay, where it `leaves_room`.
    See `slots.gather_units`."""
    if coded is not None:
        _gather_coded_units(
            host, pool, mask, start, lists, group_tokens, coded, leaves_room=leaves_room
        )
        return
    rows, width = lists.units.shape
    words = _words(host.shape[2])
    source, target = host.view(torch.int64), pool.view(torch.int64)
    assert source.stride(1) == target.stride(1) == words
    assert source.stride(2) == target.stride(2) == mask.stride(1) == 1
    tile_words = _STAYING_WORDS if leaves_room else _TILE_WORDS
    chunk = min(triton.next_power_of_2(words), tile_words)
    entries = max(1, min(tile_words // chunk, triton.next_power_of_2(width)))
    tiles, chunks = triton.cdiv(width, entries), triton.cdiv(words, chunk)
    tensors = (source, target, mask, start, lists.units, lists.slots, lists.counts)
    strides = (width, source.stride(0), target.stride(0), mask.stride(0))
    sizes = {
        "WORDS": words, "CHUNK": chunk, "ENTRIES": entries, "UNIT": group_tokens,
        "UNIT_WIDE": triton.next_power_of_2(group_tokens),
    }  # fmt: skip
    if leaves_room:
        programs = min(_STAYING_PROGRAMS, tiles * rows * chunks)
        _gather_staying[(programs,)](
            *tensors, rows, *strides, **sizes, ROWS=triton.next_power_of_2(rows), CHUNKS=chunks,
            num_warps=_STAYING_WARPS,
        )  # fmt: skip
        return
    each = triton.next_power_of_2(triton.cdiv(tiles * rows * chunks, _PROGRAMS))
    each = min(each, _MOST_TILES, triton.next_power_of_2(tiles))
    _gather[(triton.cdiv(tiles, each), rows, chunks)](
        *tensors, *strides, **sizes, TILES=each, num_warps=4
    )


def _words(unit_bytes: int) -> int:
    assert unit_bytes % 16 == 0, "16 bytes move at a time"
    return unit_bytes // 8
