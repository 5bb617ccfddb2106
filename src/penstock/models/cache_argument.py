"""cache_argument(): the keyword under which a model takes its cache; releases differ."""

import functools
import inspect
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""Since 5.24; before it, and models that were not changed with it; GPT-NeoX's layers."""

OUTPUT_NAME = next(n for n in CACHE_NAMES if n in CausalLMOutputWithPast.__annotations__)
"""The field in which a model's output has its cache."""


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` as the keyword argument of `model(...)` and of `model.generate(...)`."""
    return {_name_of(model.__class__): cache}


def cache_name_in(kwargs: dict[str, Any]) -> str:
    """The name under which a model or a layer that was called with `kwargs` got its cache."""
    return next((name for name in CACHE_NAMES if name in kwargs), CACHE_NAMES[0])


@functools.cache
def _name_of(model_class: Any) -> str:
    """Which of the names the class's `forward` takes; that of outputs where it does not say."""
    forward = getattr(model_class, "forward", model_class)
    parameters = inspect.signature(forward).parameters
    return next((n for n in (OUTPUT_NAME, *CACHE_NAMES) if n in parameters), OUTPUT_NAME)
