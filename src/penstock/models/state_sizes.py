"""measure_states(): what a model's recurrent layers hold and heed, seen before planning."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.models.cache_argument import cache_argument
from penstock.models.model_shape import ModelShape, inspect_model
from penstock.models.own_cache import OwnCache, own_cache_class
from penstock.models.weight_access import model_device


class _Seen(Exception):
    """Ends the forward pass behind the last layer that is looked at."""


class _Watched(OwnCache, DynamicCache):  # type: ignore[misc]
    """A plain cache whose model is stopped where it comes to a layer behind `last`."""

    def __init__(self, model: PreTrainedModel, last: int) -> None:
        super().__init__(config=model.config)
        self._last = last
        self.passes_for = own_cache_class(model)
        self.saw_nan = False
        """Whether keys or values were no numbers."""

    def stop_behind(self, last: int) -> None:
        """Stop the next pass elsewhere."""
        self._last = last

    def _pass(self, layer: int) -> None:
        if layer > self._last:
            raise _Seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._pass(layer_idx)
        self.saw_nan |= bool((key_states.isnan().any() | value_states.isnan().any()).item())
        both: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return both

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        super().set_linear_cache(layer_idx, linear_cache)
        # Transformers notes it with convolutions, which MiniMax has not got.
        self.layers[layer_idx].has_previous_state[0] = True

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._pass(layer_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, *args, **kwargs)
        return state


def measure_states(model: PreTrainedModel, shape: ModelShape) -> tuple[dict[int, int], bool]:
    """Run two tokens through the first recurrent layer of each kind; those of a kind are alike,
    and a layer that is not is refused when it has more. Two more show whether it heeds its state:
    Jamba's and Zamba's begin anew where several tokens come at once.

    Returns:
        Bytes of the states of one row, by layer, empty for a model without recurrent layers; and
        whether several tokens may come behind others.

    Raises:
        UnsupportedModelError: the model keeps its states elsewhere than in its cache.
    """
    if not shape.states:
        return {}, True
    first: dict[tuple[str, int], int] = {}
    for layer, count in shape.states.items():
        first.setdefault((shape.layer_types[layer], count), layer)
    name = type(model).__name__
    cache = _Watched(model, max(first.values()))
    _pass_two(model, cache)
    sizes = {kind: _row_bytes(cache.layers[layer]) for kind, layer in first.items()}
    if not all(sizes.values()):
        raise UnsupportedModelError(
            f"{name} keeps its recurrent states elsewhere than in its cache; use this model "
            "without Penstock"
        )
    held = {layer: sizes[shape.layer_types[layer], count] for layer, count in shape.states.items()}
    return held, _heeds_state(model, cache, min(first.values()))


def require_chunks(model: PreTrainedModel) -> None:
    """Refuse a model that forgets its states where several tokens come behind others.

    Raises:
        UnsupportedModelError: it does.
    """
    if not measure_states(model, inspect_model(model))[1]:
        raise UnsupportedModelError(
            f"the recurrent layers of {type(model).__name__} forget their state where several "
            "tokens come behind others, so that a text cannot be read in parts; take another model"
        )


def _pass_two(model: PreTrainedModel, cache: _Watched) -> None:
    """Run two more tokens."""
    ids = torch.ones(1, 2, dtype=torch.int64, device=model_device(model))
    try:
        with torch.no_grad():
            model(input_ids=ids, **cache_argument(model, cache), use_cache=True)
    except _Seen:
        pass
    except (ValueError, TypeError, AttributeError, LookupError) as fault:
        said = " ".join(str(fault).split())[:200]
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run with a cache of transformers "
            f"({type(fault).__name__}: {said}); use this model without Penstock"
        ) from fault


def _heeds_state(model: PreTrainedModel, cache: _Watched, layer: int) -> bool:
    """Whether what is not a number in the state of a layer is in its next one too, or in keys and
    values of the same layer (Zaya)."""
    states: dict[int, Tensor | None] = cast(Any, cache.layers[layer]).recurrent_states
    held = [state.fill_(torch.nan) for state in states.values() if state is not None]
    if not held:
        return True
    cache.stop_behind(layer)
    _pass_two(model, cache)
    new = [bool(state.isnan().any()) for state in states.values() if state is not None]
    return cache.saw_nan or all(new)


def _row_bytes(layer: Any) -> int:
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return sum(state.nbytes for state in states if state is not None)
