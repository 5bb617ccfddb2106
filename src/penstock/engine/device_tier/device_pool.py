"""DevicePool: slots on the device, and who is in which; of one layer, or of several in turn."""

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.tiers.slot_table import SlotTable
from penstock.engine.tiers.token_pool import CodedPool, TokenPool
from penstock.kernels.device.slots import FetchLists


class DevicePool:
    """A token pool, its tables, and the lists of what a step moves.

    Where layers share pools (`SlotPlan.shared_pools`) there are two, and a layer's slots are empty
    when its step begins: the fetch for a layer may run while the one before it attends.
    """

    def __init__(self, plan: SlotPlan, shape: KVShape, device: torch.device) -> None:
        """Allocate. shape: of a row."""
        rows, slots = plan.batch, plan.num_slots
        places = slots if plan.is_coded else slots + plan.kept_slots
        memory = torch.zeros(rows * places, plan.slot_bytes, dtype=torch.uint8, device=device)
        pool_type = CodedPool if plan.is_coded else TokenPool
        self.tokens: TokenPool = pool_type(
            memory, shape, batch=rows, num_slots=slots, kept_slots=plan.kept_slots,
            group_tokens=plan.group_tokens,
        )  # fmt: skip
        self.units: Tensor = memory.view(rows, places, plan.slot_bytes)
        """The same memory. uint8 [rows, slots and kept ones, slot_bytes]"""
        self.coded = shape if plan.is_coded else None
        """Of the tokens, where slots hold them in 8 bits; None: as the host has them."""
        sizes = (rows * slots, rows * plan.max_units)
        self._tables = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        self.unit_in: Tensor = self._tables[: sizes[0]].view(rows, slots)
        """Unit in each slot, -1 for none. [rows, slots]"""
        self.slot_of: Tensor = self._tables[sizes[0] :].view(rows, plan.max_units)
        """Slot of each unit, -1 for none. [rows, units]"""
        self.heads = torch.zeros(rows, dtype=torch.int32, device=device)
        """Clock hands."""
        wanted = max(1, plan.selected_units)
        self.lists = FetchLists.allocate(rows, wanted, slots, device)

    @staticmethod
    def table_bytes(rows: int, slots: int, max_units: int, wanted: int) -> int:
        """Bytes of what is beside the slots, for the ledger."""
        tables = SlotTable.num_bytes(rows, slots, max_units) + 4 * rows
        return tables + FetchLists.num_bytes(rows, wanted, slots)

    def clear(self) -> None:
        """Nothing is in any slot. Two launches, which a CUDA graph can hold."""
        self._tables.fill_(-1)
        self.tokens.hide_slots()
