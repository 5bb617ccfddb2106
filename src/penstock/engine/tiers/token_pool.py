"""TokenPool: K and V of many tokens in one tensor, attended to in place."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.kernels.plain_attention import NEGATIVE_INFINITY

_BITS = {2: torch.int16, 4: torch.int32}
"""Integers of a mask's element size."""


class TokenPool:
    """Slots of one layer plus the places of its sinks and rolling window, in one tensor.

    A slot holds one unit of G tokens; K and V of a token lie side by side, so that a slot is one
    contiguous piece of memory (a disk read lands in it directly) and yet all keys of the pool form
    one strided tensor that attention reads without a copy: KVSwap's mapping table (3.4.4) becomes
    an additive mask over the places.

        tokens   [batch, places, *shape.token_size],  places = (num_slots + kept_slots) * G
        mask     [batch, places], 0 where a place holds a visible token, minus infinity elsewhere

        place 0 .. num_slots * G             slots (fetched units)
        place num_slots * G ..               sinks and rolling window, see `RollingWindow`
    """

    def __init__(
        self,
        memory: Tensor,
        shape: KVShape,
        *,
        batch: int,
        num_slots: int,
        kept_slots: int,
        group_tokens: int,
    ) -> None:
        """Lay the pool over `memory`.

        Args:
            memory: uint8 [batch * (num_slots + kept_slots), group_tokens * shape.token_bytes].
        """
        self.num_slots = num_slots
        self.slots_per_row = num_slots + kept_slots
        self.group_tokens = group_tokens
        self.places = self.slots_per_row * group_tokens
        self.slot_places = num_slots * group_tokens
        self.memory = memory
        self.shape = shape
        self.mask = torch.full(
            (batch, self.places), NEGATIVE_INFINITY, dtype=shape.dtype, device=memory.device
        )
        # [batch, slots, group_tokens] views, to switch whole slots on and off.
        self.slot_mask: Tensor = self.mask.view(batch, self.slots_per_row, group_tokens)
        self._hold(batch)

    def _hold(self, batch: int) -> None:
        """Say what the memory is."""
        shape = self.shape
        self.tokens: Tensor = self.memory.view(shape.dtype).view(
            batch, self.places, *shape.token_size
        )
        self.keys: Tensor = shape.keys_of(self.tokens).transpose(1, 2)
        self.values: Tensor = shape.values_of(self.tokens).transpose(1, 2)

    def hide_slots(self) -> None:
        """Make every slot invisible; sinks and window stay."""
        self.mask[:, : self.slot_places] = NEGATIVE_INFINITY

    def show_slots(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Make whole slots visible. rows, slots: [count]"""
        if (
            self.mask.device.type == "cpu"
        ):  # numpy takes a tenth of torch's time; 0.0 has no bit set
            self.slot_mask.view(_BITS[self.mask.itemsize]).numpy()[rows, slots] = 0
            return
        device = self.mask.device
        where = (torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device))
        self.slot_mask[where] = 0.0

    def write_keys(self, rows: NDArray[np.int64], slots: NDArray[np.int64], keys: Tensor) -> None:
        """Overwrite the keys of some slots; those that values lie in are the true ones already.

        Args:
            rows, slots: [count]
            keys: [count, group_tokens, kv_heads, head_dim]
        """
        if self.shape.values_in_keys:
            return
        by_slot = self.tokens.view(
            -1, self.slots_per_row, self.group_tokens, *self.tokens.shape[2:]
        )
        device = self.memory.device
        where = (torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device))
        self.shape.keys_of(by_slot)[where] = keys.to(by_slot.dtype)

    def kept_tokens(self) -> Tensor:
        """The part of sinks and window, [batch, kept_slots * G, *shape.token_size]."""
        return self.tokens[:, self.slot_places :]

    def show_kept(self, tokens: Tensor, mask: Tensor) -> None:
        """Put sinks and window of a layer behind the slots, whose memory layers share."""
        self.kept_tokens().copy_(tokens)
        self.mask[:, self.slot_places :] = mask

    def take_rows(self, rows: Tensor) -> None:
        """Make the slots of row i what those of row `rows[i]` were."""
        end = self.slot_places
        copy_rows(self.tokens[:, :end], self.tokens[:, :end], rows)
        copy_rows(self.mask[:, :end], self.mask[:, :end], rows)


class CodedPool(TokenPool):
    """A pool whose slots hold units in 8 bits (`kernels.slot_codes`), and nothing else.

    Sinks and window have their memory elsewhere, and their places in the mask behind the slots. So
    there are no `tokens`, `keys` and `values`, but

        codes    uint8 [batch, num_slots * G, coded token]
    """

    @override
    def _hold(self, batch: int) -> None:
        self.slots_per_row = self.num_slots
        self.codes: Tensor = self.memory.view(batch, self.slot_places, -1)

    @override
    def show_kept(self, tokens: Tensor, mask: Tensor) -> None:
        """Attention finds the tokens where they are."""
        self.mask[:, self.slot_places :] = mask

    @override
    def take_rows(self, rows: Tensor) -> None:
        copy_rows(self.codes, self.codes, rows)
        end = self.slot_places
        copy_rows(self.mask[:, :end], self.mask[:, :end], rows)


COPY_BYTES = 1 << 20
"""Row copies go through a temporary of about this size, so that beams cost no second pool."""


def copy_rows(target: Tensor, source: Tensor, rows: Tensor) -> None:
    """Set `target[i] = source[rows[i]]`, also when both are the same tensor.

    Args:
        target: [batch, places, ...]
        source: [other_batch, places, ...]
        rows: int64 [batch], rows of `source`.
    """
    place_bytes = max(1, target[:, :1].numel() * target.element_size())
    step = max(1, COPY_BYTES // place_bytes)
    for start in range(0, target.shape[1], step):
        target[:, start : start + step] = source[:, start : start + step][rows]
