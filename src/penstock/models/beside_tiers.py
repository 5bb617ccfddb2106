"""BesideTiers: what a plain cache holds beside keys and values that go to tiers."""

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor

from penstock.models.cache_adapter import TieredCache


class BesideTiers:
    """Copies of a plain cache's sliding windows and recurrent states, as they are now."""

    def __init__(self, cache: Any, tiered: Collection[int]) -> None:
        """Copy them.

        Args:
            cache: a DynamicCache.
            tiered: its layers whose keys and values go to tiers.
        """
        self._windows = {
            i: copy.deepcopy(layer)
            for i, layer in enumerate(cache.layers)
            if i not in tiered and getattr(layer, "is_sliding", False)
        }
        self._states: dict[int, dict[str, dict[int, Tensor]]] = {
            i: {name: _cloned(getattr(layer, f"{name}_states")) for name in ("conv", "recurrent")}
            for i, layer in enumerate(cache.layers)
            if hasattr(layer, "recurrent_states")
        }

    def put_back(self, cache: Any) -> None:
        """Give them to the plain cache again."""
        for i, window in self._windows.items():
            cache.layers[i] = copy.deepcopy(window)
        for i, states in self._states.items():
            for name, tensors in states.items():
                getattr(cache.layers[i], f"{name}_states").update(_cloned(tensors))

    def hold(self, cache: TieredCache, length: int) -> None:
        """Give them to a tiered cache.

        Args:
            length: tokens that they stand for.
        """
        for i, window in self._windows.items():
            layer: Any = cache.layers[i]
            layer.hold(window.keys.clone(), window.values.clone(), window.cumulative_length)
        for i, states in self._states.items():
            named = {
                f"{name}.{number}": tensor
                for name, tensors in states.items()
                for number, tensor in _cloned(tensors).items()
            }
            cache.recurrent_layers[i].hold(named, length)


def _cloned(tensors: dict[int, Tensor | None] | dict[int, Tensor]) -> dict[int, Tensor]:
    return {number: tensor.clone() for number, tensor in tensors.items() if tensor is not None}
