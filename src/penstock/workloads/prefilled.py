"""PrefilledText: a prompt's keys and values, made once by the plain model, for any TieredCache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.models.beside_tiers import BesideTiers
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import plain_cache, tokens_of
from penstock.models.state_sizes import require_chunks
from penstock.models.weight_access import model_device

EXACT_TAIL = 33
"""Prompt tokens that a cache should still prefill itself, exactly. Some methods look at the
prompt's last 32 queries; and one alone would be a decode step over a selection."""


class PrefilledText:
    """Keys and values of some tokens, to be put into the caches of several policies.

    Prefill is exact under every policy, so nothing but time is changed by sharing it. Leave the
    last `EXACT_TAIL` tokens of a prompt to each cache itself.
    """

    def __init__(
        self, model: CausalLM, token_ids: Tensor, *, chunk: int = 1024,
        attention_mask: Tensor | None = None, progress: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Read the tokens with the plain model.

        Args:
            model: on any device; the keys and values stay there.
            token_ids: int64 [batch, tokens]
            chunk: tokens per forward pass.
            attention_mask: 0 at padding on the left; None: nothing is padded. int64
                [batch, tokens]
            progress: called with the tokens read so far, after every chunk.
        """
        self._model: Any = model
        require_chunks(model)
        device = model_device(model)
        self.length = token_ids.shape[1]
        """Tokens of each row, padding included."""
        self.cache: Any = plain_cache(model, "dynamic", self.length)
        """The plain model's own cache after the text."""
        shape = inspect_model(model)
        self.tiered, self.shape = shape.tiered_layers, shape.kv
        self._mask = (
            torch.ones_like(token_ids) if attention_mask is None else attention_mask
        ).to(device)  # fmt: skip
        for start in range(0, self.length, chunk):
            end = min(start + chunk, self.length)
            self._read(token_ids[:, start:end].to(device), self._mask[:, :end], logits_to_keep=1)
            if progress is not None:
                progress(end)
        self._visible = None if bool(self._mask.all()) else self._mask.bool()

    def _read(self, ids: Tensor, mask: Tensor, *, logits_to_keep: int) -> Tensor:
        """Feed tokens behind what the plain cache holds; [batch, logits_to_keep, vocabulary]."""
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad():
            out = self._model(
                ids, attention_mask=mask, position_ids=positions,
                **cache_argument(self._model, self.cache), use_cache=True,
                logits_to_keep=logits_to_keep,
            )  # fmt: skip
        logits: Tensor = out.logits
        return logits

    def following(self, token_ids: Tensor, last: int) -> Tensor:
        """What full attention says of tokens behind the text; the text stays as it is.

        Args:
            token_ids: what follows, read in one forward pass. int64 [batch, tokens]
            last: positions to answer for, the last ones.

        Returns:
            Logits of the token behind each of them, on the model's device.
            [batch, last, vocabulary]
        """
        count = token_ids.shape[1]
        beside = BesideTiers(self.cache, self.tiered)
        mask = torch.cat([self._mask, self._mask.new_ones(len(token_ids), count)], dim=1)
        logits = self._read(token_ids.to(mask.device), mask, logits_to_keep=last)
        for layer in self.tiered:
            cached = self.cache.layers[layer]
            cached.keys, cached.values = (
                t[:, :, : self.length] for t in (cached.keys, cached.values)
            )
        beside.put_back(self.cache)
        return logits

    def put_into(self, cache: TieredCache) -> None:
        """Give an empty cache the text.

        Raises:
            BudgetError: the cache was planned for fewer rows, and these do not fit its budget.
            CacheStateError: the cache is closed, or has less room.
            StoreFullError: the disk is full.
        """
        if not self.length:
            return
        for tier, layer in enumerate(self.tiered):
            keys, values = tokens_of(self.cache, layer, self.shape)
            cache.tiers.append(tier, keys, values, self._visible)
        BesideTiers(self.cache, self.tiered).hold(cache, self.length)
