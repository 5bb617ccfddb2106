"""WholeLayer: a layer that the device tier keeps whole, in steps that a CUDA graph can hold."""

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.attend_pool import attend_pool
from penstock.engine.device_tier.device_index import StepClock
from penstock.engine.layer import Layer
from penstock.engine.resident_layer import ResidentLayer
from penstock.engine.tiers.token_pool import copy_rows
from penstock.kernels.plain_attention import NEGATIVE_INFINITY


class WholeLayer(ResidentLayer):
    """One of the first layers that a policy keeps whole (`full_layers`), beside others that select.

    All of it is one pool with a place for each of `max_tokens` tokens. A decode step puts the new
    token where the clock is and attends to the pool under a mask, so that nothing in it depends on
    a number that only the host knows. It reads the places that are not filled yet, too.
    """

    def __init__(
        self, layer_idx: int, shape: KVShape, batch: int, max_tokens: int, clock: StepClock
    ) -> None:
        """Allocate the layer. shape: of a row."""
        super().__init__(layer_idx, shape, batch, max_tokens, clock.position.device)
        self._clock = clock
        self._mask = torch.full(
            (batch, max_tokens), NEGATIVE_INFINITY, dtype=shape.dtype, device=clock.position.device
        )

    @override
    def _allocate(
        self, shape: KVShape, batch: int, max_tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        size = (batch, max_tokens, 2, shape.num_kv_heads, shape.head_dim)
        # Zeros: what the mask hides is multiplied by nothing, which must not give NaN.
        self._tokens = torch.zeros(size, dtype=shape.dtype, device=device)
        return self._tokens[:, :, 0].transpose(1, 2), self._tokens[:, :, 1].transpose(1, 2)

    @override
    def attend(self, call: AttentionCall) -> Tensor:
        if call.query.shape[2] > 1 or self.length == 0:
            return super().attend(call)
        position = self._clock.position
        token = torch.stack((call.keys[:, :, 0], call.values[:, :, 0]), dim=1)
        self._tokens.index_copy_(1, position, token[:, None])
        self._mask.index_fill_(1, position, 0.0)
        self.length += 1
        return attend_pool(call, self._tokens, self._mask)

    @override
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        start = self.length
        super().append(keys, values, visible)
        self._mask[:, start : self.length] = 0.0
        if visible is not None:
            self._mask[:, : self.length].masked_fill_(~visible, NEGATIVE_INFINITY)

    @override
    def crop(self, length: int) -> None:
        super().crop(length)
        self._mask[:, self.length :] = NEGATIVE_INFINITY

    @override
    def take_rows_from(self, other: Layer, rows: Tensor) -> None:
        assert isinstance(other, WholeLayer)
        super().take_rows_from(other, rows)
        copy_rows(self._mask, other._mask, rows)

    @override
    def reset(self) -> None:
        self.crop(0)

    @property
    @override
    def is_recordable(self) -> bool:
        return True

    @override
    def prepare_step(self) -> bool:
        return True
