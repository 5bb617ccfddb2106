"""attended_tokens(): which tokens a decode step attended to, read off the pool, for observers."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.slot_plan import SlotPlan
from penstock.engine.attention_call import AttentionCall
from penstock.engine.tiers.slot_table import SlotTable
from penstock.engine.tiers.token_pool import TokenPool
from penstock.kernels.scaled_query import scaled_down

Observer = Callable[[int, Tensor], None]
"""Called after each decode step of a layer with the layer, and True for every token that was
attended to. bool [rows, length]"""


def attended_tokens(
    pool: TokenPool,
    table: SlotTable,
    plan: SlotPlan,
    start_units: NDArray[np.int64],
    length: int,
    selected_slots: NDArray[np.int64] | None,
) -> Tensor:
    """Where the tokens of a pool come from: what its mask shows, as positions.

    Args:
        start_units: unit that each row's sinks begin with. [rows]
        length: tokens of the sequence, the new one included.
        selected_slots: slots that were gathered, minus one for none, when attention saw those and
            sinks and window alone; None when it saw the whole pool. [rows, wanted]

    Returns:
        True at positions attended to. bool [rows, length]
    """
    shown = pool.mask == 0
    device, group_tokens = shown.device, plan.group_tokens
    if selected_slots is not None:
        kept = np.zeros(table.unit_in.shape, dtype=np.bool_)
        rows, columns = (selected_slots >= 0).nonzero()
        kept[rows, selected_slots[rows, columns]] = True
        in_slots = torch.from_numpy(kept).to(device).repeat_interleave(group_tokens, dim=1)
        shown[:, : pool.slot_places] &= in_slots
    # The window holds the newest units, each at its number modulo its slots (see RollingWindow).
    newest = -(-length // group_tokens) - 1
    newest_units = newest - (newest - np.arange(plan.window_slots)) % plan.window_slots
    sinks = start_units[:, None] + np.arange(plan.sink_slots)
    units = np.concatenate(
        [table.unit_in, sinks, np.broadcast_to(newest_units, (len(sinks), plan.window_slots))],
        axis=1,
    )
    first = torch.from_numpy(units.astype(np.int64)).to(device) * group_tokens
    offsets = torch.arange(group_tokens, device=device)
    positions = (first[:, :, None] + offsets).flatten(1)
    times = torch.zeros(len(units), length, dtype=torch.int64, device=device)
    known = positions.clamp(0, length - 1)
    assert bool((shown <= (positions == known)).all()), "a place without a token is visible"
    times.scatter_add_(1, known, shown.long())
    assert int(times.max()) <= 1, "a token was attended to twice"
    return times > 0


def slot_weights(pool: TokenPool, call: AttentionCall, slots: NDArray[np.int64]) -> Tensor:
    """Share of the softmax that each selected slot gets, over all heads.

    Args:
        slots: [batch, wanted]

    Returns:
        float32 [batch, wanted]
    """
    weights = torch.softmax(pool_logits(pool, call), dim=-1)
    by_slot = weights.sum(dim=1).view(len(weights), -1, pool.group_tokens).sum(dim=2)
    chosen = torch.from_numpy(slots).to(by_slot.device).clamp_min(0)
    return by_slot.gather(1, chosen)


def pool_logits(pool: TokenPool, call: AttentionCall) -> Tensor:
    """Logits of all places of a pool; minus infinity at those that are not attended to.

    Returns:
        float32 [batch, heads, places]
    """
    batch, heads = call.query.shape[:2]
    kv_heads = pool.keys.shape[1]
    query, factor = scaled_down(call.query.view(batch, kv_heads, heads // kv_heads, -1))
    logits = torch.matmul(query, pool.keys.transpose(2, 3)).float() * (call.scaling * factor)
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    return (logits + pool.mask[:, None, None].float()).flatten(1, 2)
