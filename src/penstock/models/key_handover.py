"""KeyHandover: keys go from a cache to the attention function, and come back to the tiers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.core.errors import CacheStateError, UnsupportedModelError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.models.attention_adapter import attention_dtype, mark_keys
from penstock.models.latents import joined, returned


class KeyHandover:
    """Marks the keys of one layer at a time, and makes sure that its attention comes to them."""

    def __init__(self, shape: KVShape, config: Any, *, unmasked: bool = False) -> None:
        """Hand nothing out yet.

        Args:
            config: of the model's decoder.
            unmasked: nothing is padded, and the mask is not looked at.
        """
        self._shape, self._config, self._unmasked = shape, config, unmasked
        self._awaited: int | None = None
        """The tier whose keys are on their way to the attention function."""
        self._has_received = False
        """Whether the attention function has ever got this cache's keys."""

    def begin_step(self) -> None:
        """Another step begins: what is on its way is of one that was given up."""
        if self._has_received:
            self._awaited = None

    def forget(self) -> None:
        """A forward pass was given up between a layer's keys and its attention."""
        self._awaited = None

    def expect(
        self, tier: int, keys: Tensor, values: Tensor, *,
        attend: Callable[[int, AttentionCall], Tensor], failed: Callable[[], None],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A layer has new keys: make sure that its attention will come to `attend`.

        Args:
            attend: called with the tier and what the attention function got.
            failed: called where the attention function refused the keys, or `attend` raised.

        Returns:
            Keys and values as the model takes them.

        Raises:
            CacheStateError: the model's attention is not Penstock's, or of another dtype.
            UnsupportedModelError: the keys are not those that the configuration promises.
        """
        if self._config._attn_implementation != "penstock":
            raise CacheStateError(
                "the model's attention implementation was changed while this cache was open, or "
                "the cache is closed"
            )
        if self._awaited is not None:
            raise UnsupportedModelError(
                "the attention function never received the keys that the cache handed out: this "
                "model transforms them in between"
            )
        shape, given = self._shape, (keys, values)
        keys, values = joined(shape, keys, values)
        found = (*keys.shape[1::2], *values.shape[1::2])
        heads = shape.num_kv_heads
        if found != (heads, shape.head_dim, heads, shape.value_width):
            raise UnsupportedModelError(
                f"keys {list(keys.shape)} and values {list(values.shape)} do not have the "
                f"{heads} heads of widths {shape.head_dim} and {shape.value_width} that the "
                "configuration promises"
            )
        dtype = attention_dtype(keys)
        if dtype != shape.dtype:
            raise CacheStateError(
                f"attention is in {dtype} now, and this cache was made for {shape.dtype}; make the "
                "cache under the autocast under which the model runs"
            )
        keys, values = keys.to(dtype), values.to(dtype)
        self._awaited = tier

        def attend_once(call: AttentionCall) -> Tensor:
            if self._awaited != tier or call.values is not values:
                raise UnsupportedModelError(
                    "this model attends twice to the keys that the cache handed out, or transforms "
                    "their values in between"
                )
            self._awaited = None
            return attend(tier, call)

        mark_keys(keys, attend_once, unmasked=self._unmasked, received=self._receive, failed=failed)
        return returned(shape, given, keys, values)

    def _receive(self) -> None:
        """The attention function has the keys that were handed out."""
        self._has_received = True
