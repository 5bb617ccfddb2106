"""DevicePool: slots on the device, and who is in which; of one layer, or of several in turn."""

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.tiers.slot_table import SlotTable
from penstock.engine.tiers.token_pool import CodedPool, TokenPool
from penstock.kernels.device.slots import FetchLists

_ALIGNED_BYTES = 512
"""A pool begins at a multiple, as an allocation of its own does."""


class DevicePool:
    """A token pool, its tables, and the lists of what a step moves.

    Where layers share pools (`SlotPlan.shared_pools`) there are two, and a layer's slots are empty
    when its step begins: the fetch for a layer may run while the one before it attends.
    """

    def __init__(self, plan: SlotPlan, shape: KVShape, memory: Tensor) -> None:
        """Lay it over zeros.

        Args:
            shape: of a row.
            memory: uint8 [num_bytes(plan)]
        """
        rows, slots, device = plan.batch, plan.num_slots, memory.device
        places = _places(plan)
        memory = memory.view(rows * places, plan.slot_bytes)
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
    def num_bytes(plan: SlotPlan) -> int:
        """Bytes of the slots, and of what lies behind them."""
        return plan.batch * _places(plan) * plan.slot_bytes

    @staticmethod
    def table_bytes(rows: int, slots: int, max_units: int, wanted: int) -> int:
        """Bytes of what is beside the slots, for the ledger."""
        tables = SlotTable.num_bytes(rows, slots, max_units) + 4 * rows
        return tables + FetchLists.num_bytes(rows, wanted, slots)

    def clear(self) -> None:
        """Nothing is in any slot. Two launches, which a CUDA graph can hold."""
        self._tables.fill_(-1)
        self.tokens.hide_slots()

    def forget(self) -> None:
        """Nothing is in any slot, and all bytes are zeros: others had the memory meanwhile.

        What they left may be no number, which attention would spread from a hidden place.
        """
        self.units.zero_()
        self.clear()
        self.heads.zero_()


def make_pools(
    count: int, plan: SlotPlan, shape: KVShape, device: torch.device
) -> tuple[list[DevicePool], Tensor]:
    """Pools that lie side by side.

    Args:
        shape: of a row.

    Returns:
        The pools, and the memory that all of them have together. uint8 [bytes]
    """
    num_bytes = DevicePool.num_bytes(plan)
    apart = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    memory = torch.zeros(count * apart, dtype=torch.uint8, device=device)
    pools = [
        DevicePool(plan, shape, memory[first : first + num_bytes])
        for first in range(0, count * apart, apart)
    ]
    return pools, memory


def _places(plan: SlotPlan) -> int:
    """Slots of a row, and what lies behind them."""
    return plan.num_slots if plan.is_coded else plan.num_slots + plan.kept_slots
