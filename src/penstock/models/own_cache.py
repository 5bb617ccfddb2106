"""OwnCache: what a model needs that asks for a cache class of its own (MiniMax)."""

import sys
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

_CLASSES = ("MiniMaxCache",)


def own_cache_class(model: PreTrainedModel) -> type[Any] | None:
    """The class that a model's code wants its cache to be of; None: any cache will do."""
    module = sys.modules.get(type(model).__module__)
    found = (getattr(module, name, None) for name in _CLASSES)
    return next((each for each in found if isinstance(each, type)), None)


def dynamic_cache(model: PreTrainedModel) -> Any:
    """An empty cache of transformers as a model makes it for itself."""
    own = own_cache_class(model)
    return DynamicCache(config=model.config) if own is None else own()


class OwnCache:
    """Passes for the class that the model asks for, and has a recurrent state under its names."""

    passes_for: type[Any] | None = None
    """That class; None: its own."""
    get_recurrent_state: Any
    update_recurrent_state: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # `isinstance` asks it where the type says no
        return self.passes_for or type(self)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name of `get_recurrent_state`."""
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's name of `update_recurrent_state`."""
        self.update_recurrent_state(linear_cache, layer_idx)
