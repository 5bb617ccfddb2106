"""RuntimeSettings: everything about a cache that is decided before the first token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.core.shape import KVShape
from penstock.core.trace import Tracer
from penstock.engine.adapter import LayerAdapter
from penstock.engine.policy import Rotary, SelectionPolicy
from penstock.engine.stored_past import StoredPast
from penstock.kernels.key_rotation import KeyRotation
from penstock.storage.store import Sealing

STATE_COPIES = 2
"""Copies of a recurrent state that a cache holds beside checkpoints: now, and before the last
step."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Everything that is decided before the first token."""

    shape: KVShape
    policy: SelectionPolicy
    limit_bytes: int | None
    """Budget for all fast memory of the cache; None for no limit."""
    store: str
    """A directory, "auto", "memory" or a simulated device, as `KVStore.create` takes it."""
    sealed: Sealing = "auto"
    """Encrypt what the cache writes to a disk."""
    max_tokens: int
    exact: bool
    adapter: Sequence[LayerAdapter] | None
    """One basis per tiered layer."""
    scaling: float | None = None
    """Factor on the model's logits; None for 1 / sqrt(head_dim)."""
    rotary: Rotary | None = None
    """The model's rotary embedding, for indexes that want keys as they were before it."""
    rotations: Sequence[KeyRotation | None] | None = None
    """How each tiered layer's keys turn, for policies that want to know; layers that turn alike
    have the same object."""
    true_query_layers: frozenset[int] = frozenset()
    """Tiered layers whose query is not worth predicting; they wait for the true one."""
    state_bytes: int = 0
    """What recurrent layers of one sequence hold beside the tiers, in bytes."""
    predictor_bytes: int = 0
    """What copies of the predicting weights would take, where they would be faster."""
    device: torch.device
    device_tier: bool = False
    """KV is in host memory that the device reads itself; `store` says nothing then."""
    tracer: Tracer | None = None
    progress: Callable[[int], None] | None = None
    """Called with the tokens cached so far after every prefill chunk."""
    prompt_tokens: int | None = None
    """Of a row, padding included, where they are known: its index is made behind the last chunk."""
    must_tier: bool = False
    """Tokens go through the tiers even where the budget would hold them all."""
    sector_bytes: int | None = None
    """What units are padded to; None: the store's sectors."""
    past: StoredPast | None = None
    """What the cache begins with, once it is restored."""
    index_progress: Callable[[float], None] | None = None
    """Called with the share of the prompt's index that is made, from 0 to 1."""

    @property
    def logit_scaling(self) -> float:
        """Factor on the products of queries and keys."""
        return self.shape.head_dim**-0.5 if self.scaling is None else self.scaling

    @property
    def shares_past(self) -> bool:
        """Whether the past's units are read where they are."""
        return (
            self.past is not None
            and not self.device_tier
            and self.past.is_shared_by(self.policy, exact=self.exact)
        )
