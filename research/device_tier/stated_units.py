"""StatedUnits: selections of which a stated share stays, in place of those that drawn queries make.

How much of a selection outlives a turn decides what a method moves, and drawn queries over drawn
keys leave next to nothing (`device_tier.follow` has what a language model leaves). A method scores
and selects as ever, so that all its costs stay, and only which units have won is replaced (as
`workloads.selection_streams` does for the tiers that the host drives).
"""

import torch
from torch import Tensor

from penstock.core.slot_plan import SlotPlan
from penstock.engine.device_tier.device_index import Wanted
from research.device_tier.query_stream import SEGMENTS, QueryStream


class StatedUnits:
    """The selections of all layers of one cache, one table on the device.

    Place j of a selection has units of its own, those that are j after a multiple of the
    selection's width: whatever stays and whatever moves, all of them are distinct. There are
    `SEGMENTS / 2 + 1` sets, gone through there and back, so that any two that follow one another
    have `stays` in common. Rows, layers and segments turn where the stream's queries do.
    """

    def __init__(
        self, stream: QueryStream, plan: SlotPlan, *, at_turns: bool, stays: float, seed: int = 0
    ) -> None:
        """Allocate the table; nothing is stated yet.

        Args:
            stream: of the queries that select.
            plan: of the cache.
            at_turns: a selection lasts for a segment; otherwise for a step.
            stays: share of a selection that is in the next one, in [0, 1].
        """
        self._plan, self._stays, self._seed = plan, stays, seed
        device, rows = stream.number.device, plan.batch
        steps = torch.arange(len(stream.number), device=device)[:, None] % SEGMENTS
        number = stream.number if at_turns else steps.expand_as(stream.number)
        number = number.repeat_interleave(rows // number.shape[1], dim=1)
        self._entry = number * rows + torch.arange(rows, device=device)
        size = (SEGMENTS * rows, plan.selected_units)
        self._ids = torch.full(size, -1, dtype=torch.int32, device=device)
        self._stream = stream

    @property
    def num_bytes(self) -> int:
        """Of the tables on the device, which are no cache's."""
        return self._entry.nbytes + self._ids.nbytes

    def state(self, length: int) -> bool:
        """Draw the selections of steps from `length` tokens on, in the tensors that are there.

        Returns:
            Whether there are units enough: twice as many before the window as are selected.
            Otherwise the method's own selections stay.
        """
        plan = self._plan
        width, rows = plan.selected_units, plan.batch
        end = length // plan.group_tokens - plan.window_slots
        choices = (end - plan.sink_slots) // width
        if choices < 2:
            self._ids.fill_(-1)
            return False
        device = self._ids.device
        draw = torch.Generator(device).manual_seed(self._seed)
        size = (rows, width)
        place = torch.arange(width, device=device) + plan.sink_slots
        table = self._ids.view(SEGMENTS, rows, width)
        chosen = torch.randint(choices, size, generator=draw, device=device)
        for number in range(SEGMENTS // 2 + 1):
            if number:
                moved = torch.rand(size, generator=draw, device=device) >= self._stays
                by = torch.randint(1, choices, size, generator=draw, device=device)
                chosen = torch.where(moved, (chosen + by) % choices, chosen)
            table[number] = chosen * width + place
            table[-number % SEGMENTS] = table[number]
        return True

    def write(self, layer: int, position: Tensor, wanted: Wanted) -> None:
        """Put the step's selection in place of what has won.

        Args:
            layer: number of the layer.
            position: int64 [1], on the device.
            wanted: what the method has selected; its `ids` are written over.
        """
        entry = self._stream.at_step(self._entry, layer, position)[0]
        stated = self._ids.index_select(0, entry)
        wanted.ids.copy_(torch.where(stated < 0, wanted.ids, stated))
