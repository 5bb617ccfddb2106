"""measure_states(): what the recurrent layers of a model hold, seen before planning."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.models.cache_argument import cache_argument
from penstock.models.model_shape import ModelShape
from penstock.models.weight_access import model_device


class _Seen(Exception):
    """Ends the forward pass behind the last layer that is looked at."""


class _Watched(DynamicCache):  # type: ignore[misc]
    """A plain cache whose model is stopped where it comes to a layer behind `last`."""

    def __init__(self, model: PreTrainedModel, last: int) -> None:
        super().__init__(config=model.config)
        self._last = last

    def _pass(self, layer: int) -> None:
        if layer > self._last:
            raise _Seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._pass(layer_idx)
        both: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return both

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._pass(layer_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, *args, **kwargs)
        return state


def measure_states(model: PreTrainedModel, shape: ModelShape) -> dict[int, int]:
    """Run two tokens through the first recurrent layer of each kind; those of a kind are alike,
    and a layer that is not is refused when it has more.

    Returns:
        Bytes of the states of one row, by layer; empty for a model without recurrent layers.

    Raises:
        UnsupportedModelError: the model keeps its states elsewhere than in its cache.
    """
    if not shape.states:
        return {}
    first: dict[tuple[str, int], int] = {}
    for layer, count in shape.states.items():
        first.setdefault((shape.layer_types[layer], count), layer)
    name = type(model).__name__
    cache = _Watched(model, max(first.values()))
    ids = torch.ones(1, 2, dtype=torch.int64, device=model_device(model))
    try:
        with torch.no_grad():
            model(input_ids=ids, **cache_argument(model, cache), use_cache=True)
    except _Seen:
        pass
    except (ValueError, TypeError, AttributeError, LookupError) as fault:
        said = " ".join(str(fault).split())[:200]
        raise UnsupportedModelError(
            f"{name} does not run with a cache of transformers ({type(fault).__name__}: {said}); "
            "use this model without Penstock"
        ) from fault
    sizes = {kind: _row_bytes(cache.layers[layer]) for kind, layer in first.items()}
    if not all(sizes.values()):
        raise UnsupportedModelError(
            f"{name} keeps its recurrent states elsewhere than in its cache; use this model "
            "without Penstock"
        )
    return {layer: sizes[shape.layer_types[layer], count] for layer, count in shape.states.items()}


def _row_bytes(layer: Any) -> int:
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return sum(state.nbytes for state in states if state is not None)
