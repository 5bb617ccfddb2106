"""Decode steps of requests that run at the same time."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument, position_argument
from penstock.models.loader import CausalLM
from penstock.models.weight_access import model_device


def next_logits(model: CausalLM, cache: TieredCache, tokens: Sequence[int]) -> Tensor:
    """Take one token a row into a cache without padding.

    Returns:
        Logits behind them. float32 [rows, vocabulary]

    Raises:
        CacheStateError, FetchError, StoreFullError: as for the cache.
    """
    called: Any = model
    device, at, rows = model_device(model), cache.get_seq_length(), len(tokens)
    ids = torch.tensor(tokens, device=device)[:, None]
    options: dict[str, Any] = {}
    calls = cache.decoder_calls
    if calls is not None and calls.has_axes:  # or the model goes on from its newest prompt
        options["attention_mask"] = torch.ones((rows, at + 1), dtype=torch.int64, device=device)
        options["position_ids"] = torch.full((rows, 1), at, device=device)
    else:
        options |= position_argument(model, cache, at, at + 1, rows)
    if "logits_to_keep" in inspect.signature(called.forward).parameters:
        options["logits_to_keep"] = 1
    logits: Tensor = called(ids, **cache_argument(model, cache), **options, use_cache=True).logits
    return logits[:, -1].float()
