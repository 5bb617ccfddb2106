"""store_tokens() and append_token() in Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

_TILE_VALUES = 2048
"""Numbers of the keys that one program of `store_tokens` writes, and as many of the values."""


@triton.jit(do_not_specialize=["new", "first"])
def _store(
    keys_ptr, values_ptr, host_ptr, new, first,
    key_row, key_head, key_token, value_row, value_head, value_token, host_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_WIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, DIM_WIDE)[None, :]
    whole = (token < new) & (dim < DIM)
    key = keys_ptr + row * key_row + head * key_head + token * key_token + dim
    value = values_ptr + row * value_row + head * value_head + token * value_token + dim
    there = host_ptr + row * host_row + (first + token) * (2 * HEADS * DIM) + head * DIM + dim
    tl.store(there, tl.load(key, mask=whole), mask=whole)
    tl.store(there + HEADS * DIM, tl.load(value, mask=whole), mask=whole)


def store_tokens_triton(keys: Tensor, values: Tensor, host_tokens: Tensor, first: int) -> None:
    """One program per row, head and run of tokens; see `append.store_tokens`."""
    rows, heads, new, dim = keys.shape
    _check_host(host_tokens, heads, dim)
    assert keys.stride(3) == values.stride(3) == 1
    assert first + new <= host_tokens.shape[1]
    if new == 0:
        return
    wide = triton.next_power_of_2(dim)
    tokens = max(1, _TILE_VALUES // wide)
    _store[(triton.cdiv(new, tokens), heads, rows)](
        keys, values, host_tokens, new, first,
        *keys.stride()[:3], *values.stride()[:3], host_tokens.stride(0),
        HEADS=heads, DIM=dim, DIM_WIDE=wide, TOKENS=tokens, num_warps=4,
    )  # fmt: skip


@triton.jit
def _append(
    keys_ptr, values_ptr, host_ptr, window_ptr, mask_ptr, position_ptr, start_ptr,
    key_row, key_head, value_row, value_head, host_row, window_row, mask_row,
    HEADS: tl.constexpr, HEADS_WIDE: tl.constexpr, DIM: tl.constexpr, DIM_WIDE: tl.constexpr,
    SINKS: tl.constexpr, SINKS_WIDE: tl.constexpr,
    WINDOW: tl.constexpr, UNIT: tl.constexpr, UNIT_WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr)
    head, dim = tl.arange(0, HEADS_WIDE)[:, None], tl.arange(0, DIM_WIDE)[None, :]
    whole = (head < HEADS) & (dim < DIM)
    key = tl.load(keys_ptr + row * key_row + head * key_head + dim, mask=whole)
    value = tl.load(values_ptr + row * value_row + head * value_head + dim, mask=whole)
    within = head * DIM + dim

    there = host_ptr + row * host_row + position * (2 * HEADS * DIM) + within
    tl.store(there, key, mask=whole)
    tl.store(there + HEADS * DIM, value, mask=whole)

    unit, offset = position // UNIT, position % UNIT
    window_place = SINKS + unit % WINDOW * UNIT
    window_ptr += row * window_row
    there = window_ptr + (window_place + offset) * (2 * HEADS * DIM) + within
    tl.store(there, key, mask=whole)
    tl.store(there + HEADS * DIM, value, mask=whole)

    # The token is shown; a unit that begins hides what its slot held before.
    mask_ptr += row * mask_row
    place = tl.arange(0, UNIT_WIDE)
    shown = tl.where(place == offset, 0.0, -float("inf")).to(mask_ptr.dtype.element_ty)
    changed = (place < UNIT) & ((place == offset) | (offset == 0))
    tl.store(mask_ptr + window_place + place, shown, mask=changed)

    if SINKS > 0:
        start = tl.load(start_ptr + row)
        first = (start // UNIT * UNIT).to(tl.int64)
        place = position - first
        is_sink = whole & (place >= 0) & (place < SINKS)
        there = window_ptr + place * (2 * HEADS * DIM) + within
        tl.store(there, key, mask=is_sink)
        tl.store(there + HEADS * DIM, value, mask=is_sink)
        # Sinks that have left the window with this unit are shown.
        sink = tl.arange(0, SINKS_WIDE)
        window_start = tl.maximum(unit + 1 - WINDOW, 0) * UNIT
        left = (first + sink < window_start) & (first + sink >= start)
        shown = tl.where(left, 0.0, -float("inf")).to(mask_ptr.dtype.element_ty)
        tl.store(mask_ptr + sink, shown, mask=(sink < SINKS) & (offset == 0))


def append_token_triton(
    keys: Tensor,
    values: Tensor,
    host_tokens: Tensor,
    window: Tensor,
    window_mask: Tensor,
    position: Tensor,
    start: Tensor,
    *,
    sink_places: int,
    window_slots: int,
    group_tokens: int,
) -> None:
    """One program per row; see `append.append_token`."""
    rows, heads, dim = keys.shape
    _check_host(host_tokens, heads, dim)
    assert keys.stride(2) == values.stride(2) == window_mask.stride(1) == 1
    assert window.stride()[1:] == host_tokens.stride()[1:], "only the window's rows may be strided"
    assert window.shape[1] == window_mask.shape[1] == sink_places + window_slots * group_tokens
    _append[(rows,)](
        keys, values, host_tokens, window, window_mask, position, start,
        *keys.stride()[:2], *values.stride()[:2],
        host_tokens.stride(0), window.stride(0), window_mask.stride(0),
        HEADS=heads, HEADS_WIDE=triton.next_power_of_2(heads),
        DIM=dim, DIM_WIDE=triton.next_power_of_2(dim),
        SINKS=sink_places, SINKS_WIDE=triton.next_power_of_2(max(sink_places, 1)),
        WINDOW=window_slots, UNIT=group_tokens, UNIT_WIDE=triton.next_power_of_2(group_tokens),
        num_warps=4 if heads * dim >= 1024 else 1,
    )  # fmt: skip


def _check_host(host_tokens: Tensor, heads: int, dim: int) -> None:
    expected = (2 * heads * dim, heads * dim, dim, 1)
    assert host_tokens.stride()[1:] == expected, "the tokens of a row lie side by side"
