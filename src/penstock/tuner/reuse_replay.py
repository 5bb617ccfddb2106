"""Hit rates of reuse buffers of any size, from the selections that one run recorded.

Source: KVSwap (arXiv 2511.11907), section 3.4.3 and appendix A.1 (reuse rate by capacity C).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.fetch_plan import plan_fetch
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import SlotTable
from penstock.workloads.recorded_stream import Recording
from penstock.workloads.selection_streams import NOTHING, as_selection


def reuse_rates(
    recordings: Sequence[Recording], capacities_tokens: Iterable[int]
) -> dict[int, float]:
    """Hit rates of several capacities, all recordings together.

    Args:
        recordings: of one policy on several texts.
        capacities_tokens: tokens that the slots of a layer hold; whole units of it count.

    Returns:
        The share of selected units that were there, by capacity.
    """
    rates = {}
    for capacity in capacities_tokens:
        counts = [_counts(each, capacity // each.group_tokens) for each in recordings]
        wanted, hit = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        rates[capacity] = hit / wanted if wanted else 0.0
    return rates


def _counts(recording: Recording, num_slots: int) -> tuple[int, int]:
    """Units that were selected, and those of them that the slots had."""
    units = recording.first_tokens
    units = np.where(units == NOTHING, NOTHING, units // recording.group_tokens)
    wanted, hit = int((units != NOTHING).sum()), 0
    if units.shape[3] <= num_slots:
        hit = sum(_hits(units[:, layer], num_slots) for layer in range(units.shape[1]))
    return wanted, hit


def _hits(units: NDArray[np.int64], num_slots: int) -> int:
    """Hits of one layer. units: [steps, rows, wanted]"""
    rows = units.shape[1]
    table, fifo = SlotTable(rows, num_slots, int(units.max()) + 1), FIFO(rows, num_slots)
    selected = [step for step in units if (step != NOTHING).any()]
    return sum(plan_fetch(as_selection(step)[1], table, fifo).num_hit for step in selected)
