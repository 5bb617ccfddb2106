"""KVShape: layers, heads, head_dim, dtype, and the byte sizes that follow."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """The shape of one model's tiered KV cache (its full-attention layers only)."""

    num_layers: int
    """Full-attention layers, the ones that go through tiers."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head (1 for MHA)."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def joint_dim(self) -> int:
        """Width of the keys of one token, all KV heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.joint_dim * self.dtype.itemsize

    def of_layers(self, num_layers: int) -> "KVShape":
        """The same shape with so many layers."""
        return replace(self, num_layers=num_layers)

    def full_cache_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of the whole cache, all layers, for `batch` sequences of `tokens` tokens."""
        return self.num_layers * batch * tokens * self.token_bytes
