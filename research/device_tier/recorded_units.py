"""RecordedUnits: selections that a language model made, played on another model's shape."""

import re
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SlotPlan
from penstock.engine.device_tier.device_index import Wanted
from penstock.workloads.recorded_stream import Recording

ROW_SHIFT, SEQUENCE_SHIFT = 37, 101
"""Steps by which heads that play the same recorded head, and sequences, are apart."""


class RecordedUnits:
    """The selections of all layers of one cache, in the form of `StatedUnits`.

    Layer i plays layer i of the recording, head j its head j, counted on from the first where there
    are no more, with a shift in time. A row is due where its selection is another than in the step
    before, and where the recording begins anew. Units are those of the recording, whatever the
    context: the tokens lie in host memory, where a place is as good as another.
    """

    def __init__(self, recording: Recording, plan: SlotPlan, rows_per_sequence: int,
                 device: torch.device) -> None:  # fmt: skip
        """Put the recording on the device.

        Args:
            plan: of the cache; its units and its selections are as large as those recorded.

        Raises:
            ConfigError: they are not.
        """
        first, group = recording.first_tokens, recording.group_tokens
        wanted = first.shape[3]
        if (group, wanted) != (plan.group_tokens, plan.selected_units):
            raise ConfigError(
                f"the recording has {wanted} units of {group} tokens, the cache has "
                f"{plan.selected_units} of {plan.group_tokens}; record the same method"
            )
        self._plan, self._most = plan, int(first.max()) // group
        ids = torch.from_numpy(first)
        steps, layers, heads, _ = ids.shape
        valid, units = ids >= 0, ids.clamp_min(0) // group
        changed = (units[1:] != units[:-1]).any(dim=3) | (valid[1:] != valid[:-1]).any(dim=3)
        due = torch.cat([torch.ones_like(changed[:1]), changed])
        # By layer, then step and head.
        self._ids = units.int().transpose(0, 1).reshape(layers, -1, wanted).to(device)
        self._valid = valid.transpose(0, 1).reshape(layers, -1, wanted).to(device)
        self._due = due.transpose(0, 1).reshape(layers, -1).to(device)
        self.share = float(due.float().mean())
        """Of steps at which a head retrieves."""
        row = torch.arange(plan.batch, device=device)
        head = row % rows_per_sequence
        self._shift = SEQUENCE_SHIFT * (row // rows_per_sequence) + ROW_SHIFT * (head // heads)
        self._head, self._heads, self._steps = head % heads, heads, steps

    @property
    def num_bytes(self) -> int:
        """Of the tables on the device, which are no cache's."""
        tables = (self._ids, self._valid, self._due, self._shift, self._head)
        return sum(table.nbytes for table in tables)

    def state(self, length: int) -> bool:
        """Whether the recording's units can be played from `length` tokens on.

        Raises:
            ConfigError: they lie in the window by then.
        """
        if self._most >= length // self._plan.group_tokens - self._plan.window_slots:
            raise ConfigError(f"the recording is of a longer context than {length:,} tokens")
        return True

    def write(self, layer: int, position: Tensor, wanted: Wanted) -> None:
        """Put the step's selection in place of what the method has chosen.

        Args:
            layer: number of the layer.
            position: int64 [1], on the device.
        """
        at = (position + self._shift) % self._steps * self._heads + self._head
        layer %= len(self._ids)
        wanted.ids.copy_(self._ids[layer].index_select(0, at))
        wanted.valid.copy_(self._valid[layer].index_select(0, at))
        wanted.due.copy_(self._due[layer].index_select(0, at))


def recording_file(folder: Path, method: str) -> Path:
    """Where a method's recording is, by its text without flags: two settings of a policy differ."""
    name = re.sub(r"[^\w.=@]+", "-", method.partition("!")[0].strip())
    return folder / f"{name}.npz"


def read_recording(folder: Path, method: str) -> Recording:
    """The recording of a method.

    Raises:
        ConfigError: there is none.
    """
    path = recording_file(folder, method)
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name}; record the same method")
    return Recording.load(path)
