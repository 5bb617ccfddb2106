"""AttentionTap: watches what comes to the attention of the tiered layers of a plain cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import UnsupportedModelError
from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.models.attention_adapter import Attachment, mark_keys
from penstock.models.latents import joined, returned
from penstock.models.loader import CausalLM
from penstock.models.model_shape import ModelShape


class AttentionTap:
    """Full attention that shows every call to a callback before it answers.

    Args:
        cache: a plain cache of transformers.
        shape: of the model; its tiered layers are watched.
        see: called with the number of a tiered layer and the call.
    """

    def __init__(
        self, cache: Any, shape: ModelShape, see: Callable[[int, AttentionCall], None]
    ) -> None:
        self._held = [cache.layers[index] for index in shape.tiered_layers]
        self._see, self._shape = see, shape.kv
        self._seen: set[int] = set()

    @contextmanager
    def watching(self, model: CausalLM) -> Iterator[None]:
        """Put the layers' attention through this object."""
        attachment = Attachment(model)
        for number, layer in enumerate(self._held):
            layer.update = self._marking(layer.update, number)
        try:
            yield
        finally:
            attachment.detach()
            for layer in self._held:
                del layer.update

    def check_all_seen(self) -> None:
        """Every layer must have been called since the last check.

        Raises:
            UnsupportedModelError: a layer's keys never came to the attention function.
        """
        if len(self._seen) != len(self._held):
            raise UnsupportedModelError(
                "the attention function never received the keys of the cache: this model "
                "transforms them in between"
            )
        self._seen = set()

    def _marking(self, update: Callable[..., tuple[Tensor, Tensor]], number: int) -> Any:
        def attend(call: AttentionCall) -> Tensor:
            self._see(number, call)
            self._seen.add(number)
            mask = None
            if (visible := call.visible) is not None:
                mask = torch.zeros(visible.shape, dtype=call.query.dtype, device=visible.device)
                mask = mask.masked_fill(~visible, NEGATIVE_INFINITY)
            total, new = AttentionSum(call), call.query.shape[2]
            if mask is None and new > 1:
                if past := call.keys.shape[2] - new:
                    total.add(call.keys[:, :, :past], call.values[:, :, :past], None)
                total.add(call.keys[:, :, -new:], call.values[:, :, -new:], None, causal=True)
            else:
                total.add(call.keys, call.values, mask)
            return total.result()

        def marking(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            given = update(*args, **kwargs)
            keys, values = joined(self._shape, *given)
            mark_keys(keys, attend)
            return returned(self._shape, given, keys, values)

        return marking
