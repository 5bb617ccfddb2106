"""Synthetic documents: keys and values put into a cache as if a prompt had been prefilled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import attending_layers, put_tokens
from penstock.models.weight_access import model_device

CHUNK_TOKENS = 2048
_SHIFT = 131


class SyntheticKV:
    """Random keys and values of any length from one piece of noise.

    Chunks differ by the sign of every channel and by a shift in time, which costs a copy where
    fresh normal numbers would cost minutes; nothing repeats, and nothing compresses on disk.
    """

    def __init__(self, shape: KVShape, batch: int, device: torch.device, seed: int = 0) -> None:
        """Draw the noise: 2 * 2304 tokens of one layer for `batch` rows."""
        self._draw = torch.Generator().manual_seed(seed)
        width = max(shape.head_dim, shape.value_width)
        size = (2, batch, shape.num_kv_heads, CHUNK_TOKENS + 2 * _SHIFT, width)
        noise = torch.empty(size, dtype=shape.dtype)
        for part in noise.flatten(0, 1):
            part.copy_(torch.randn(part.shape, generator=self._draw))
        self._noise = noise.to(device)
        self._out = torch.empty_like(self._noise[:, :, :, :CHUNK_TOKENS])
        self._shape = shape

    def chunk(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The next keys and values, valid until the next call.

        Returns:
            Both [batch, kv_heads, tokens, width], tokens at most `CHUNK_TOKENS`.
        """
        size = (2, 1, self._shape.num_kv_heads, 1, self._noise.shape[-1])
        signs = torch.randint(0, 2, size, generator=self._draw).mul_(2).sub_(1)
        start = int(torch.randint(0, 2 * _SHIFT, (1,), generator=self._draw))
        out = self._out[:, :, :, :tokens]
        source = self._noise[:, :, :, start : start + tokens]
        torch.mul(source, signs.to(source.device, source.dtype), out=out)
        if self._shape.values_in_keys:
            return out[0], out[0, ..., : self._shape.value_width]
        return out[0, ..., : self._shape.head_dim], out[1, ..., : self._shape.value_width]

    def fill(
        self, cache: Any, tokens: int, progress: Callable[[float], None] = lambda share: None,
        model: CausalLM | None = None,
    ) -> None:  # fmt: skip
        """Put `tokens` tokens into every layer of a `TieredCache` or a plain cache.

        Args:
            progress: called with the share done.
            model: of the cache; one with recurrent layers reads the first two tokens, and its
                states behind them stand for all.
        """
        tiered = isinstance(cache, TieredCache)
        recurrent = model is not None and bool(inspect_model(model).states)
        if model is not None and recurrent:
            tokens -= _read_two(model, cache, self._noise.shape[1])
        layers = range(self._shape.num_layers) if tiered else attending_layers(cache)
        with unthrottled(cache) if tiered else nullcontext():
            for start in range(0, tokens, CHUNK_TOKENS):
                for layer in layers:
                    keys, values = self.chunk(min(CHUNK_TOKENS, tokens - start))
                    if tiered:
                        cache.tiers.append(layer, keys, values)
                    else:
                        put_tokens(cache, layer, self._shape, keys, values)
                    if tiered and start == 0:
                        _reserve(cache, layer)
                progress(min(1.0, (start + CHUNK_TOKENS) / tokens))
            if tiered:
                for layer in cache.tiers.layers:
                    getattr(layer, "drain", lambda: None)()
                for state in cache.recurrent_layers.values():
                    state.stand_for(cache.get_seq_length())


def _read_two(model: Any, cache: Any, rows: int) -> int:
    """Pass two tokens through the model; returns how many that were."""
    ids = torch.ones(rows, 2, dtype=torch.int64, device=model_device(model))
    with torch.no_grad():
        model(ids, **cache_argument(model, cache), use_cache=True)
    return 2


def _reserve(cache: TieredCache, layer: int) -> None:
    """Make room at once for all that will come; growing a file chunk by chunk is slow."""
    runtime = cache.tiers
    if runtime._store is not None and runtime.plan.num_slots:
        runtime._store.region(layer).reserve(runtime.plan.batch * runtime.plan.max_units)


@contextmanager
def unthrottled(cache: TieredCache) -> Iterator[None]:
    """Let a simulated device take writes for nothing while the document is put in."""
    store = cache.tiers._store
    throttle = None if store is None else store.throttle
    if throttle is None:
        yield
        return
    profile = throttle.profile
    throttle.profile = replace(profile, iops=1e12, write_bandwidth=1e15, bandwidth=1e15)
    try:
        yield
    finally:
        throttle.profile = profile
