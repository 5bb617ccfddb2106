"""TieredCacheLayer and WindowLayer: the layers of a TieredCache, as transformers calls them."""

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer
from typing_extensions import override

from penstock.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from penstock.models.cache_adapter import TieredCache


_Dummy: Any = getattr(cache_utils, "DummyLayer", object)


class TieredCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One full-attention layer: hands new keys and values on, answers for what the tiers hold."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "TieredCache", tier: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._tier = tier
        self.is_initialized = True

    @property
    def keys(self) -> None:
        """Never there as one tensor.

        Raises:
            UnsupportedModelError: a model that reads its cache by itself.
        """
        raise UnsupportedModelError(
            "this model reads keys or values out of its cache by itself; they are in tiers, so use "
            "it without Penstock"
        )

    @keys.setter
    def keys(self, _: None) -> None:
        """The base class begins with none."""

    values = keys

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCacheLayer":
        raise UnsupportedModelError(
            "this model copies layers of its cache; use it without Penstock"
        )

    @property
    def _owner(self) -> "TieredCache":
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the runtime allocates when the first layer attends."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys, so that the attention function finds the tiers; nothing is stored yet.

        Returns:
            The new keys and values alone, in the cache's dtype. [batch, kv_heads, new_tokens,
            head_dim]
        """
        return self._owner._expect(self._tier, key_states, value_states)

    def get_seq_length(self, *_: Any) -> int:
        """Tokens held, padding included."""
        return self._owner._runtime.layer_length(self._tier)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys that the new queries see."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + count, 0

    def get_max_length(self) -> int:
        """Most tokens that fit."""
        return self._owner.max_tokens

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Done for all layers together by the cache."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Done for all layers together by the cache."""

    def offload(self) -> None:
        """Nothing to do: that is what the tiers are for."""

    def prefetch(self) -> None:
        """Nothing to do: that is what the tiers are for."""


class EmptyLayer(_Dummy):  # type: ignore[misc]
    """A layer that keeps nothing (experts or an MLP alone)."""

    is_sliding = False


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding window whose newest tokens can be taken back, as far as its last update goes.

    The window is a view of what the last update put together. What it let go of lies in the same
    memory until the next update, so that going back costs none.
    """

    keys: Tensor | None
    values: Tensor | None
    cumulative_length: int
    is_initialized: bool
    _whole: tuple[Tensor, Tensor, Tensor] | None = None
    """Keys and values of the last update, uncut, and the keys that were cut from them."""

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One that is interrupted leaves no trace."""
        before = self.held()
        try:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
        except BaseException:
            self.hold_again(before)
            raise
        assert self.keys is not None
        self._whole = None if getattr(self, "record_past", False) else (keys, values, self.keys)
        return keys, values

    def hold(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Hold the newest tokens of a text of `length` in place of what is there.

        Args:
            keys: as a window of transformers keeps them. [batch, kv_heads, tokens, head_dim]
            values: likewise.
        """
        self.clear()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.cumulative_length = keys, values, length

    def held(self) -> tuple[Any, ...]:
        """All that it holds, for `hold_again`; costs the memory of a window from then on."""
        return self.keys, self.values, self.cumulative_length, self.is_initialized, self._whole

    def hold_again(self, held: tuple[Any, ...]) -> None:
        """Be as it was when `held` was asked for; rows are the same."""
        self.keys, self.values, self.cumulative_length, self.is_initialized, self._whole = held

    def _kept(self) -> tuple[Tensor, Tensor]:
        """Keys and values that are there still, what the window let go of last included."""
        if self._whole is not None and self._whole[2] is self.keys:
            return self._whole[:2]
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def can_remove(self, count: int) -> bool:
        """Whether the window would be whole without its newest `count` tokens."""
        if count == 0 or count >= self.cumulative_length:
            return True
        left = self._kept()[0].shape[-2] - count
        return bool(left >= min(self.sliding_window - 1, self.cumulative_length - count))

    def remove(self, count: int) -> None:
        """Forget the newest `count` tokens, of which `can_remove` holds; 0 cuts what is kept of the
        past to the window."""
        if self.cumulative_length == 0:
            return
        count = min(count, self.cumulative_length)
        keys, values = self._kept()
        end = keys.shape[-2] - count
        start = max(0, end - self.sliding_window + 1)
        self.keys, self.values = keys[:, :, start:end], values[:, :, start:end]
        self._whole = keys[:, :, :end], values[:, :, :end], self.keys
        self.cumulative_length -= count

    def forget_past(self) -> None:
        """Let go of what the window has let go of: rows have changed."""
        self._whole = None

    def clear(self) -> None:
        """Forget every token; another number of rows may follow."""
        # Older transformers fill what is there with zeros, and append to it.
        self._whole = self.keys = self.values = None
        self.is_initialized = False
        self.reset()
