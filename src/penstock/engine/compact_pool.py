"""CompactPool: selected slots gathered side by side, for pools much larger than a selection."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.layer_cache import LayerSetup
from penstock.engine.tiers.token_pool import TokenPool
from penstock.kernels.plain_attention import NEGATIVE_INFINITY


class CompactPool:
    """Scratch that the selected slots are gathered into when the pool holds much more."""

    def __init__(self, setup: LayerSetup) -> None:
        plan, shape = setup.plan, setup.shape
        self._slots = plan.selected_units + plan.kept_slots
        self._batch, self._group_tokens = plan.batch, plan.group_tokens
        count = self._batch * self._slots
        self._memory = torch.empty(count, plan.unit_bytes, dtype=torch.uint8, device=setup.device)
        self._mask = torch.empty(count, plan.group_tokens, dtype=shape.dtype, device=setup.device)
        self._dtype = shape.dtype
        self._shape = shape

    def gather(self, pool: TokenPool, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the selected slots, sinks and window together.

        Returns:
            Keys [batch, kv_heads, places, head_dim], values [batch, kv_heads, places, value_width]
            and the additive mask [batch, places].
        """
        base = np.arange(self._batch)[:, None] * pool.slots_per_row
        kept = np.arange(pool.num_slots, pool.slots_per_row)
        numbers = np.concatenate([base + slots.clip(0), base + kept], axis=1)
        index = torch.from_numpy(numbers.reshape(-1)).to(pool.memory.device)
        places = numbers.shape[1] * self._group_tokens
        memory, mask = self._memory[: index.numel()], self._mask[: index.numel()]
        torch.index_select(pool.memory, 0, index, out=memory)
        torch.index_select(pool.slot_mask.flatten(0, 1), 0, index, out=mask)
        if (slots < 0).any():
            hidden = torch.from_numpy(slots < 0).to(mask.device)
            mask.view(self._batch, numbers.shape[1], -1)[:, : slots.shape[1]].masked_fill_(
                hidden.unsqueeze(-1), NEGATIVE_INFINITY
            )
        tokens = memory.view(self._dtype).view(self._batch, places, *self._shape.token_size)
        keys, values = self._shape.keys_of(tokens), self._shape.values_of(tokens)
        return keys.transpose(1, 2), values.transpose(1, 2), mask.view(self._batch, places)
