"""RecurrentCache: what transformers asks of a cache about its recurrent layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from penstock.core.errors import CacheStateError, UnsupportedModelError
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.models.cache_layers import WindowLayer
from penstock.models.own_cache import OwnCache
from penstock.models.recurrent_layers import StateLayer, StateStep


class RecurrentCache(OwnCache, Cache):  # type: ignore[misc]
    """The seam of recurrent layers, and where a step begins.

    A layer with a recurrence and attention has its state here and its keys among `layers`.
    """

    _runtime: TieredRuntime
    _others: Sequence[WindowLayer | StateLayer]
    """What holds tokens beside the tiers."""
    _states: dict[int, StateLayer]
    """The recurrent layers, by layer of the model."""
    takes_chunks = True
    """Whether a forward pass of several tokens may come behind others."""
    _room = 0
    """Checkpoints that the budget has room for."""
    _step = StateStep(0, 0)
    """The forward pass under way, or the last one."""
    _at = -1
    """The layer that the model came to last; a step begins where the next is not behind it."""
    _done: tuple[Any, ...] = ()
    """What the model has asked of that layer; a step begins where it asks the same again."""
    _stored: tuple[int, Callable[[], None]] | None = None
    """Tokens of a stored text, and what brings the states behind it."""

    def _begin_step(self) -> None:
        """Refuse what cannot be taken in, and begin `_step`."""
        raise NotImplementedError

    def _enter(self, layer: int, asked: Any) -> None:
        """The model comes to a layer, or asks another thing of it."""
        if layer < self._at or self._at < 0 or (layer == self._at and asked in self._done):
            self._begin_step()
            self._at = -1
        if layer != self._at:
            self._at, self._done = layer, ()
        self._done += (asked,)

    def _enter_state(self, layer: int, asked: Any) -> StateLayer:
        if layer not in self._states:
            raise ValueError(f"layer {layer} has no recurrent state")
        self._enter(layer, asked)
        state = self._states[layer]
        state.begin(self._step)
        return state

    def _require_chunks(self, count: int) -> None:
        """Refuse tokens of which the model's own code would forget what came before.

        Raises:
            UnsupportedModelError: says how they can be read.
        """
        if count > 1 and self._step.start > 0 and not self.takes_chunks:
            raise UnsupportedModelError(
                "the recurrent layers of this model forget their state where several tokens come "
                "behind others (so does transformers' own cache); pass a prompt whole, and what is "
                "behind it token by token"
            )

    # What models call -------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The newest inputs of a convolution, which may be changed in place; None: there are none.

        Raises:
            CacheStateError: closed, or an earlier step failed halfway.
        """
        layer = self._enter_state(layer_idx, ("get", "conv", state_idx))
        held: Tensor | None = layer.conv_states[state_idx]
        return held if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent state, which may be changed in place; None: there is none.

        Raises:
            CacheStateError: closed, or an earlier step failed halfway.
        """
        layer = self._enter_state(layer_idx, ("get", "recurrent", state_idx))
        held: Tensor | None = layer.recurrent_states[state_idx]
        return held if layer.has_previous_state[state_idx] else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """As `StateLayer.update_conv_state`."""
        layer = self._enter_state(layer_idx, ("conv", state_idx))
        return layer.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """As `StateLayer.update_recurrent_state`."""
        layer = self._enter_state(layer_idx, ("recurrent", state_idx))
        return layer.update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a recurrent layer, or the last one, holds a state."""
        if not self._states or (layer_idx is not None and layer_idx not in self._states):
            raise ValueError(f"layer {layer_idx} has no recurrent state")
        layer = self._states[max(self._states) if layer_idx is None else layer_idx]
        if state_idx is None:
            return all(layer.has_previous_state.values())
        return bool(layer.has_previous_state[state_idx])

    # Going back -------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can go back to every length."""
        croppable: bool = super().is_croppable
        return croppable and not self._states

    def activate_past_recording(self) -> None:
        """Prepare for decoding that takes drafts back.

        Raises:
            CacheStateError: there are recurrent layers.
        """
        if self._states:
            raise CacheStateError(
                "this model has recurrent layers, whose state cannot be taken back token by token: "
                "prompt lookup and assisted decoding do not work with it; leave them out"
            )
        super().activate_past_recording()

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have a state that cannot be cut, so that `crop` goes to places alone."""
        return bool(self._states)

    @property
    def recurrent_layers(self) -> Mapping[int, StateLayer]:
        """By layer of the model."""
        return self._states

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Lengths that `crop` can go back to, ascending; empty without recurrent layers, for which
        every length is one (a sliding window may say no)."""
        common = [layer.lengths() for layer in self._states.values()]
        return tuple(sorted(set.intersection(*common))) if common else ()

    def checkpoint(self) -> None:
        """Keep the recurrent states as they are now, so that `crop` can come back to this length;
        of several, the newest `checkpoints` stay. Does nothing without recurrent layers.

        Raises:
            CacheStateError: closed, or a step failed halfway.
        """
        self._runtime.check_sound()
        for layer in self._states.values():
            layer.keep(self._room)

    def rewind(self, length: int) -> int:
        """Go back to `length` tokens, or as far in front of it as layers must.

        Returns:
            Tokens held then: `length` where every layer can go there; with recurrent layers the
            last of `checkpoints` before it, and what is missing counts as prefilled again
            (`stats.again_tokens`); where a sliding window has moved too far on, 0.
        """
        length, rows = min(length, self._runtime.sound_length()), self._runtime.batch
        places = [place for place in self.checkpoints if place <= length]
        keep = max(places, default=0) if self._states else length
        if keep and all(each.can_remove(each.get_seq_length() - keep) for each in self._others):
            self.crop(keep)
        else:
            keep = 0
            self.reset()
        if self._states:
            self._runtime.stats.again_tokens += (length - keep) * rows
        return keep

    def _require_way_back(self, keep: int) -> None:
        """Refuse to go where a layer cannot.

        Raises:
            CacheStateError: names the layer's kind, and where it can go.
        """
        for layer in self._others:
            held = layer.get_seq_length()
            if layer.can_remove(held - keep):
                continue
            if isinstance(layer, WindowLayer):
                raise CacheStateError(
                    f"a sliding window of {layer.sliding_window} tokens has moved too far on to go "
                    f"back from {held} tokens to {keep}; reset() the cache"
                )
            places = ", ".join(f"{each:,}" for each in self.checkpoints)
            raise CacheStateError(
                f"recurrent layers have no state behind {keep:,} of {held:,} tokens, but behind "
                f"{places}: rewind({keep}) the cache to the last of these in front of it, and pass "
                "the tokens behind it again"
            )

    def states_stored(self, length: int, load: Callable[[], None]) -> None:
        """The states behind so many tokens are on a disk, and `crop` can bring them again.

        Args:
            load: gives every recurrent layer its states, see `StateLayer.hold`.
        """
        self._stored = (length, load)
        for layer in self._states.values():
            layer.stored_length = length

    def _load_states(self, length: int) -> None:
        """Bring states that are on a disk, where memory has no others of this length."""
        if self._stored is None or length != self._stored[0]:
            return
        near = (layer.nearest() for layer in self._states.values())
        if not all(length in each for each in near):
            self._stored[1]()
