"""plan_slots(), gather_units(), gather_range(): from host memory into slots, without a wait."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.device.available import uses_triton
from penstock.kernels.device.host_view import host_view
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.kernels.slot_codes import codes_of

ABSENT = -1


@dataclass(frozen=True, slots=True)
class FetchLists:
    """What one step must move, row by row, and what was moved so far. Made once, then reused."""

    units: Tensor
    """Missing units, in the order in which they were wanted. int32 [rows, wanted]"""
    slots: Tensor
    """The slot that each one takes. int32 [rows, wanted]"""
    counts: Tensor
    """How many entries of a row's lists are of this step. int32 [rows]"""
    traffic: Tensor
    """Units wanted and units missing, summed over all steps. int64 [rows, 2]"""
    pinned: Tensor
    """Scratch: slots that hold wanted units. int32 [rows, slots]"""

    @staticmethod
    def allocate(rows: int, wanted: int, slots: int, device: torch.device) -> "FetchLists":
        """Empty lists for tables of this size; `slots` is at least `wanted`."""
        assert slots >= wanted, "every wanted unit needs a slot"
        return FetchLists(
            units=torch.zeros(rows, wanted, dtype=torch.int32, device=device),
            slots=torch.zeros(rows, wanted, dtype=torch.int32, device=device),
            counts=torch.zeros(rows, dtype=torch.int32, device=device),
            traffic=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            pinned=torch.zeros(rows, slots, dtype=torch.int32, device=device),
        )

    @staticmethod
    def num_bytes(rows: int, wanted: int, slots: int) -> int:
        """Bytes of lists of this size, for the ledger."""
        return rows * (4 * (2 * wanted + slots + 1) + 16)


def plan_slots(
    wanted: Tensor,
    valid: Tensor,
    due: Tensor,
    unit_in: Tensor,
    slot_of: Tensor,
    heads: Tensor,
    lists: FetchLists,
) -> None:
    """Choose slots for what is missing, first in, first out, and admit it to the tables.

    The device's form of `runtime.fetch_plan.plan_fetch` with the `FIFO` policy: in the order of
    its columns, each missing unit takes the next slot, from the row's clock hand on, that holds no
    wanted unit. The hand stops behind the last slot taken.

    Source: KVSwap, section 3.4.3 (slot table, FIFO).

    Args:
        wanted: units from 0 on, distinct where valid. int32 [rows, wanted]
        valid: False for units that are not missed; their slots are kept too. bool [rows, wanted]
        due: rows that are planned; the others keep their tables and fetch nothing. bool [rows]
        unit_in: unit in each slot or -1; updated. int32 [rows, slots]
        slot_of: slot of each unit or -1, its inverse; updated. int32 [rows, units]
        heads: where each row's clock hand stands; updated. int32 [rows]
        lists: filled; entries behind a row's count mean nothing.
    """
    if uses_triton(wanted):
        from penstock.kernels.device.slots_triton import plan_slots_triton

        plan_slots_triton(wanted, valid, due, unit_in, slot_of, heads, lists)
    else:
        plan_slots_twin(wanted, valid, due, unit_in, slot_of, heads, lists)


def plan_slots_twin(
    wanted: Tensor,
    valid: Tensor,
    due: Tensor,
    unit_in: Tensor,
    slot_of: Tensor,
    heads: Tensor,
    lists: FetchLists,
) -> None:
    """The meaning of `plan_slots` in plain torch; a last column takes what means nothing."""
    width, num_slots, num_units = wanted.shape[1], unit_in.shape[1], slot_of.shape[1]
    found = slot_of.gather(1, wanted.long())
    missing = (found < 0) & valid & due[:, None]
    counts = missing.sum(dim=1, keepdim=True)
    pinned = _with_last_column(torch.zeros_like(unit_in, dtype=torch.bool))
    pinned.scatter_(1, torch.where(found < 0, num_slots, found).long(), True)

    hand = torch.arange(num_slots, device=wanted.device)
    order = (heads.long()[:, None] + hand) % num_slots
    free = ~pinned.gather(1, order)
    rank = free.cumsum(dim=1) - 1
    chosen = free & (rank < counts)
    nth = torch.where(missing, missing.cumsum(dim=1) - 1, width)
    lists.units.copy_(_with_last_column(lists.units).scatter_(1, nth, wanted)[:, :width])
    nth = torch.where(chosen, rank, width)
    taken = _with_last_column(lists.slots).scatter_(1, nth, order.int())
    lists.slots.copy_(taken[:, :width])
    lists.counts.copy_(counts[:, 0])
    lists.traffic[:, 0] += (valid & due[:, None]).sum(dim=1)
    lists.traffic[:, 1] += counts[:, 0]

    former = unit_in.gather(1, order)
    evicted = torch.where(chosen & (former >= 0), former, num_units).long()
    entering = lists.units.gather(1, rank.clamp(0, width - 1))
    table = _with_last_column(slot_of).scatter_(1, evicted, ABSENT)
    table.scatter_(1, torch.where(chosen, entering, num_units).long(), order.int())
    slot_of.copy_(table[:, :num_units])
    unit_in.scatter_(1, order, torch.where(chosen, entering, former))
    passed = torch.where(chosen, hand + 1, 0).amax(dim=1)
    heads.copy_((heads + passed) % num_slots)


def _with_last_column(table: Tensor) -> Tensor:
    return torch.nn.functional.pad(table, (0, 1))


def gather_units(
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
    """Copy the missing units from host memory into their slots, and show their tokens.

    Source: LouisKV, section 5 (row gather from host memory).

    Args:
        host: every unit of the layer; pinned if the pool is on CUDA. `unit_bytes` is a multiple
            of 16. uint8 [rows, units, unit_bytes]
        pool: uint8 [rows, at least `slots`, unit_bytes], or the bytes of a unit in 8 bits
        mask: additive, of the pool's places: that of token t of the unit in slot s is s *
            group_tokens + t. Set to 0, or minus infinity at padding. [rows, places]
        start: first position that is not padding. int32 [rows]
        lists: what to move, from `plan_slots`.
        group_tokens: tokens of a unit.
        leaves_room: for other work that is under way on the device.
        coded: what the units hold, where their slots hold them in 8 bits (`kernels.slot_codes`).
    """
    if uses_triton(pool):
        from penstock.kernels.device.slots_triton import gather_units_triton

        gather_units_triton(
            host, pool, mask, start, lists, group_tokens, leaves_room=leaves_room, coded=coded
        )
    else:
        gather_units_twin(host, pool, mask, start, lists, group_tokens, coded=coded)


def gather_units_twin(
    host: Tensor,
    pool: Tensor,
    mask: Tensor,
    start: Tensor,
    lists: FetchLists,
    group_tokens: int,
    *,
    coded: KVShape | None = None,
) -> None:
    """The meaning of `gather_units` in plain torch; lists are padded with their first entry."""
    device = pool.device
    rows = torch.arange(pool.shape[0], device=device)[:, None]
    entries = torch.arange(lists.units.shape[1], device=device)
    entries = torch.where(entries < lists.counts[:, None], entries, 0)
    units, slots = lists.units.gather(1, entries).long(), lists.slots.gather(1, entries).long()
    some = (lists.counts > 0)[:, None, None]
    fetched = host_view(host, device)[rows, units]
    if coded is not None:
        tokens = fetched.view(coded.dtype)
        tokens = tokens.view(*fetched.shape[:2], group_tokens, *coded.token_size)
        fetched = codes_of(tokens).flatten(2)
    pool[rows, slots] = torch.where(some, fetched, pool[rows, slots])
    offsets = torch.arange(group_tokens, device=device)
    places = slots[..., None] * group_tokens + offsets
    padding = units[..., None] * group_tokens + offsets < start[:, None, None]
    shown = torch.zeros_like(places, dtype=mask.dtype).masked_fill_(padding, NEGATIVE_INFINITY)
    index = (rows[..., None], places)
    mask[index] = torch.where(some, shown, mask[index])


def gather_range(host: Tensor, out: Tensor, first_unit: int, count: int) -> None:
    """Copy units that lie side by side, of every row (a prefill chunk streams the past with it).

    torch's own copy from pinned memory reaches the link's rate; a kernel of ours was 10 % slower.

    Args:
        host: as for `gather_units`. uint8 [rows, units, unit_bytes]
        out: on the device. uint8 [rows, at least `count`, unit_bytes]
        first_unit: the first one to copy.
        count: how many.
    """
    there = host_view(host, out.device)
    out[:, :count].copy_(there[:, first_unit : first_unit + count])
