"""cache_argument() and position_argument(): a model's cache, and positions, as keywords."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""Since 5.24; before it, and models that were not changed with it; GPT-NeoX's layers."""

OUTPUT_NAME = next(n for n in CACHE_NAMES if n in CausalLMOutputWithPast.__annotations__)
"""The field in which a model's output has its cache."""


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """`cache` as the keyword argument of `model(...)` and of `model.generate(...)`."""
    return {_name_of(model.__class__): cache}


def position_argument(
    model: Any, cache: Any, begin: int, end: int, rows: int = 1
) -> dict[str, Tensor]:
    """The positions of tokens without padding, for `model(...)`, as `generate` gives them.

    Models differ in what they make of none: RoBERTa's count from their padding token, Bamba begins
    each pass at 0, and those that see go on from the newest prompt.

    Returns:
        `position_ids`, int64 [rows, end - begin]; nothing where the model takes none.
    """
    if "position_ids" not in _parameters(model.__class__):
        return {}
    return {"position_ids": torch.arange(begin, end, device=cache.device).expand(rows, -1)}


def cache_name_in(kwargs: dict[str, Any]) -> str:
    """The name under which a model or a layer that was called with `kwargs` got its cache."""
    return next((name for name in CACHE_NAMES if name in kwargs), OUTPUT_NAME)


@functools.cache
def _name_of(model_class: Any) -> str:
    """Which of the names the class's `forward` takes; that of outputs where it does not say."""
    names = _parameters(model_class)
    return next((n for n in (OUTPUT_NAME, *CACHE_NAMES) if n in names), OUTPUT_NAME)


@functools.cache
def _parameters(model_class: Any) -> frozenset[str]:
    """The names of what the class's `forward` takes."""
    forward = getattr(model_class, "forward", model_class)
    return frozenset(inspect.signature(forward).parameters)
