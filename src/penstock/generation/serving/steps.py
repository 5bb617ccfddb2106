"""Decode steps of requests that run at the same time."""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.closing import close_all
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument, position_argument
from penstock.models.joined_cache import JoinedCache, may_join
from penstock.models.loader import CausalLM
from penstock.models.weight_access import model_device


class Steps:
    """Steps caches of one model, those that may join in one forward pass."""

    def __init__(self, model: CausalLM) -> None:
        """Nothing is on the model yet."""
        self._model = model
        self._joined: dict[Hashable, JoinedCache] = {}
        self.joint = 0
        """Forward passes that several caches shared."""
        self.passes = 0

    def __call__(
        self, caches: Sequence[TieredCache], tokens: Sequence[Sequence[int]]
    ) -> list[Tensor | Exception]:
        """Take one token a row into each cache.

        Returns:
            For each cache the logits behind its tokens, float32 [rows, vocabulary], or what it
            failed of.
        """
        sets: dict[Hashable, list[int]] = {}
        for number, cache in enumerate(caches):
            settings, policy, tiers = cache.tiers.settings, cache.policy, cache.tiers
            alike = (
                policy.predicts, settings.exact, settings.true_query_layers, tiers.on_device_tier,
                _is_recorded(cache),
            )  # fmt: skip
            joins = may_join(self._model, cache)
            sets.setdefault(alike if joins else number, []).append(number)
        for kind, numbers in [*sets.items()]:
            if len(numbers) == 1 and _is_recorded(caches[numbers[0]]):
                sets[numbers[0]] = sets.pop(kind)  # its step alone is one CUDA graph
        found: dict[int, Tensor | Exception] = {}
        for kind, numbers in sets.items():
            part = [caches[number] for number in numbers], [tokens[number] for number in numbers]
            found |= zip(numbers, self._step(kind, *part), strict=True)
        return [found[number] for number in range(len(caches))]

    def _step(
        self, kind: Hashable, caches: list[TieredCache], tokens: list[Sequence[int]]
    ) -> Sequence[Tensor | Exception]:
        self.passes += 1
        self.joint += len(caches) > 1
        try:
            if isinstance(kind, int):
                return [next_logits(self._model, caches[0], tokens[0])]
            if kind not in self._joined:
                self._joined[kind] = JoinedCache(self._model, caches[0])
            return self._joined[kind].step(caches, tokens)
        except Exception as error:
            return [error] * len(caches)

    def close(self) -> None:
        """Leave the model as it was."""
        joined, self._joined = self._joined, {}
        close_all(*(each.close for each in joined.values()))


def _is_recorded(cache: TieredCache) -> bool:
    """Whether a cache's steps alone are CUDA graphs."""
    return cache.graph_decoder is not None and cache.tiers.on_device_tier


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
