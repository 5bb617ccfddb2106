"""Synthetic documents: keys and values put into a cache as if a prompt had been prefilled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.models.cache_adapter import TieredCache
from penstock.models.plain_model import put_tokens

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
        self, cache: Any, tokens: int, progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Put `tokens` tokens into every layer of a `TieredCache` or a plain cache.

        Args:
            progress: called with the share done.
        """
        tiered = isinstance(cache, TieredCache)
        with unthrottled(cache) if tiered else nullcontext():
            for start in range(0, tokens, CHUNK_TOKENS):
                for layer in range(self._shape.num_layers):
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
