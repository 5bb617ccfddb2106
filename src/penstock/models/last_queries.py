"""LastQueries: the queries of the tokens that a model read last, true ones and predicted ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.models.attention_adapter import Attachment
from penstock.models.query_projection import QueryProjection, decoder_layers


class LastQueries:
    """Keeps the inputs of all layers while it watches, and makes queries of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.layers = decoder_layers(model)
        self._projection = QueryProjection(self.layers)
        self._inputs: dict[int, tuple[Tensor, dict[str, Any]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the inputs of all layers."""
        handles = [
            layer.register_forward_pre_hook(self._watcher(i), with_kwargs=True)
            for i, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watcher(self, i: int) -> Callable[..., None]:
        def watch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._inputs[i] = (hidden, {k: v for k, v in kwargs.items() if k != "hidden_states"})

        return watch

    def inputs(self, layer: int) -> tuple[Tensor, dict[str, Any]]:
        """What a layer was called with last: hidden states, and the arguments beside them."""
        return self._inputs[layer]

    def forget(self) -> None:
        """Let go of the inputs, and of the cache that came with them."""
        self._inputs = {}

    def true(self, layer: int, count: int) -> Tensor:
        """The layer's own of the last `count` tokens. float32 [1, heads, count, head_dim]"""
        return self.made_from(layer, layer, count)

    def made_from(self, source: int, layer: int, count: int) -> Tensor:
        """What `layer` would make of the input of `source` (KVSwap 3.3). As `true`."""
        hidden, kwargs = self._inputs[source][0], self._inputs[layer][1]
        attachment = Attachment(self._model)
        try:
            with torch.no_grad():
                return self._projection.probe(layer, hidden, kwargs)[:, :, -count:].float()
        finally:
            attachment.detach()
