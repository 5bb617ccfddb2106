"""store_tokens() and append_token(): new keys and values, to host memory and to the window."""

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.device.host_view import host_view
from penstock.kernels.plain_attention import NEGATIVE_INFINITY


def store_tokens(keys: Tensor, values: Tensor, host_tokens: Tensor, first: int) -> None:
    """Write the tokens of a prefill chunk to host memory, straight from the device.

    Args:
        keys, values: contiguous in their last dimension. [rows, kv_heads, new, head_dim]
        host_tokens: pinned if the keys are on CUDA; token p of row r at [r, p].
            [rows, tokens, 2, kv_heads, head_dim]
        first: position of the first new token.
    """
    if uses_triton(keys):
        from penstock.kernels.device.append_triton import store_tokens_triton

        store_tokens_triton(keys, values, host_tokens, first)
    else:
        store_tokens_twin(keys, values, host_tokens, first)


def store_tokens_twin(keys: Tensor, values: Tensor, host_tokens: Tensor, first: int) -> None:
    """The meaning of `store_tokens` in plain torch."""
    there = host_view(host_tokens, keys.device)[:, first : first + keys.shape[2]]
    there[:, :, 0] = keys.transpose(1, 2)
    there[:, :, 1] = values.transpose(1, 2)


def append_token(
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
    """Write one decoded token to host memory and to the window of sinks and newest units.

    The device's form of `tiers.rolling_window.RollingWindow.write_one`, on the same places: first
    the sinks, then a window in which unit u has slot u % window_slots. A unit that begins takes
    its slot from the oldest one, and a sink unit is shown once it has left the window.

    Source: KVSwap, section 3.4.1 (rolling buffer).

    Args:
        keys, values: contiguous in their last dimension. [rows, kv_heads, head_dim]
        host_tokens: pinned if the keys are on CUDA. [rows, tokens, 2, kv_heads, head_dim]
        window: the pool's places behind its slots, whose rows may be strided.
            [rows, sink_places + window_slots * group_tokens, 2, kv_heads, head_dim]
        window_mask: the same places, additive, whose rows may be strided.
        position: the token's. int64 [1], on the device of the keys
        start: first position that is not padding. int32 [rows]
        sink_places: of a row's first units that are not padding; a multiple of group_tokens.
        window_slots: units that the window holds, at least 2.
        group_tokens: tokens of a unit.
    """
    if uses_triton(keys):
        from penstock.kernels.device.append_triton import append_token_triton as append
    else:
        append = append_token_twin
    append(
        keys, values, host_tokens, window, window_mask, position, start,
        sink_places=sink_places, window_slots=window_slots, group_tokens=group_tokens,
    )  # fmt: skip


def append_token_twin(
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
    """The meaning of `append_token` in plain torch; the position stays on the device."""
    token = torch.stack([keys, values], dim=1)
    host_view(host_tokens, keys.device).index_copy_(1, position, token[:, None])

    unit, offset = position // group_tokens, position % group_tokens
    offsets = torch.arange(group_tokens, device=keys.device)
    places = sink_places + unit % window_slots * group_tokens + offsets
    window.index_copy_(1, places.gather(0, offset), token[:, None])
    marks = window_mask.index_select(1, places)
    marks = marks.masked_fill(offset == 0, NEGATIVE_INFINITY).masked_fill(offsets == offset, 0.0)
    window_mask.index_copy_(1, places, marks)
    if sink_places == 0:
        return
    first = start[:, None] // group_tokens * group_tokens
    positions = first + torch.arange(sink_places, device=keys.device)
    written = (positions == position)[..., None, None, None]
    sinks, sink_mask = window[:, :sink_places], window_mask[:, :sink_places]
    sinks.copy_(torch.where(written, token[:, None], sinks))
    window_start = (unit + 1 - window_slots).clamp_min(0) * group_tokens
    shown = (positions < window_start) & (positions >= start[:, None])
    visible = torch.zeros_like(sink_mask).masked_fill_(~shown, NEGATIVE_INFINITY)
    sink_mask.copy_(torch.where(offset == 0, visible, sink_mask))
