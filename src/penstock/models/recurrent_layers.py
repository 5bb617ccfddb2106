"""StateLayer and its kin: recurrent layers of a TieredCache, as transformers calls them.

A state stands for all tokens that went through it. It cannot be cut, so that a layer comes back to
lengths alone whose state it has: now, before its last step, checkpoints, and the stored text's end.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import cache_utils

from penstock.core.errors import UnsupportedModelError

_Linear: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", object)
HAS_RECURRENT_LAYERS = "state_idx" in inspect.signature(
    getattr(_Linear, "update_conv_state", lambda: None)
).parameters  # fmt: skip
"""Whether this release of transformers calls a cache of recurrent layers as it is written here."""


@dataclass
class StateStep:
    """A forward pass. Until its tokens have come to a layer that counts them, one is assumed."""

    start: int
    count: int = 1
    is_counted: bool = False

    @property
    def end(self) -> int:
        """Tokens behind it."""
        return self.start + self.count


@dataclass(frozen=True)
class _Held:
    """The states behind a step. Tensors in it are never written to."""

    step: StateStep
    conv: Mapping[int, Tensor]
    recurrent: Mapping[int, Tensor]
    widths: Mapping[int, int]

    def rows(self, rows: Tensor) -> "_Held":
        """Of other rows."""

        def taken(states: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {i: state.index_select(0, rows.to(state.device)) for i, state in states.items()}

        return _Held(self.step, taken(self.conv), taken(self.recurrent), self.widths)


class StateLayer(_Linear):  # type: ignore[misc]
    """One recurrent layer. What it holds is in the ledger: the states now, those before the last
    step, and checkpoints.

    A model may change a state in place, or hand a new one over. It is given copies, so that a step
    which is refused, interrupted or taken back leaves the states before it as they were.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False
    device: torch.device | None
    dtype: torch.dtype | None

    def __init__(self, number_of_states: int, row_bytes: int) -> None:
        """Hold nothing yet.

        Args:
            number_of_states: convolutions and recurrences of the layer.
            row_bytes: what the states of one row take, as the ledger has it.
        """
        _Linear.__init__(self, number_of_states=number_of_states)
        self._row_bytes = row_bytes
        self._step = StateStep(0, 0)
        self._before: _Held | None = None
        self._checkpoints: dict[int, _Held] = {}
        self.stored_length: int | None = None
        """Tokens of a stored text; its states can be read again."""

    # What the model calls ---------------------------------------------------------------------

    def begin(self, step: StateStep) -> None:
        """A forward pass comes to this layer, for the first time or again."""
        if self._step is step:
            return
        self._before = held = self._held()
        self._step = step
        for i, state in held.conv.items():
            self.conv_states[i] = state.clone()
        for i, state in held.recurrent.items():
            self.recurrent_states[i] = state.clone()

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the first states are taken as they come."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take new inputs of a convolution in.

        Args:
            conv_states: [batch, channels, tokens]
            conv_kernel_size: tokens to keep; None: as many as there are now, or were at first.

        Returns:
            What was kept and the new inputs. [batch, channels, kept + tokens]
        """
        width = self.conv_kernel_size[state_idx]
        if width is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = width
        if self.has_previous_state[state_idx]:
            seen = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        else:
            seen = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._take(self.conv_states, state_idx, seen[..., -width:].detach().clone())
        self.is_conv_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Take a new state in. [batch, ...]"""
        new, old = recurrent_states.detach(), self.recurrent_states[state_idx]
        own = new.is_contiguous() and new.untyped_storage().nbytes() == new.nbytes
        new = new.to(old.dtype if old is not None else new.dtype, copy=not own)
        self._take(self.recurrent_states, state_idx, new)
        self.is_recurrent_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return new

    def _take(self, states: dict[int, Tensor | None], index: int, new: Tensor) -> None:
        """Hold a state, which must be as large as was measured before the budget was divided.

        Raises:
            UnsupportedModelError: it is larger.
        """
        states[index] = new
        if self.device is None:
            self.device, self.dtype = new.device, new.dtype
        held = sum(each.nbytes // each.shape[0] for each in self._tensors())
        if held > self._row_bytes:
            raise UnsupportedModelError(
                f"a recurrent layer holds {held:,} bytes a row, and the first layer of its kind "
                f"promised {self._row_bytes:,}; use this model without Penstock"
            )

    def _tensors(self) -> Iterable[Tensor]:
        every = (*self.conv_states.values(), *self.recurrent_states.values())
        return (state for state in every if state is not None)

    # Going back -------------------------------------------------------------------------------

    def get_seq_length(self, *_: Any) -> int:
        """Tokens that went through, padding included."""
        return self._step.end

    def lengths(self) -> set[int]:
        """Lengths that it can go back to."""
        stored = self.stored_length
        return self.nearest() if stored is None else self.nearest() | {stored}

    def nearest(self) -> set[int]:
        """Those of them whose states are in memory."""
        before = () if self._before is None else (self._before.step.end,)
        return {0, self._step.end, *self._checkpoints, *before}

    def can_remove(self, count: int) -> bool:
        """Whether it has the states without the newest `count` tokens."""
        return self._step.end - count in self.lengths()

    def remove(self, count: int) -> None:
        """Forget the newest `count` tokens, of which `can_remove` holds; to the stored text's end,
        `hold` brings it."""
        length = self._step.end - count
        if count == 0:
            return
        if length <= 0:
            self.clear()
        elif self._before is not None and self._before.step.end == length:
            self.hold_again(self._before)
        elif length in self._checkpoints:
            self.hold_again(self._checkpoints[length])
        self._checkpoints = {n: each for n, each in self._checkpoints.items() if n <= length}

    def keep(self, room: int) -> None:
        """Make a checkpoint of the states now; the newest `room` stay."""
        self._checkpoints[self._step.end] = self._held()
        for length in sorted(self._checkpoints)[:-room] if room else list(self._checkpoints):
            del self._checkpoints[length]

    def held(self) -> Any:
        """All that it holds now, for `hold_again`."""
        return self._held()

    def _held(self) -> _Held:
        def there(states: dict[int, Tensor | None]) -> dict[int, Tensor]:
            return {i: state for i, state in states.items() if state is not None}

        widths = {i: width for i, width in self.conv_kernel_size.items() if width is not None}
        conv, recurrent = there(self.conv_states), there(self.recurrent_states)
        return _Held(self._step, conv, recurrent, widths)

    def hold_again(self, held: _Held) -> None:
        """Be as it was when `held` was asked for."""
        self._step, self._before = StateStep(held.step.end, 0), None
        for i in range(self.number_of_states):
            self.conv_states[i], self.recurrent_states[i] = held.conv.get(i), held.recurrent.get(i)
            self.conv_kernel_size[i] = held.widths.get(i)
            self.is_conv_states_initialized[i] = i in held.conv
            self.is_recurrent_states_initialized[i] = i in held.recurrent
            self.has_previous_state[i] = i in held.conv or i in held.recurrent

    def state_tensors(self) -> dict[str, Tensor]:
        """The states now, by name. [rows, ...]"""
        held = self._held()
        parts = {f"conv.{i}": state for i, state in held.conv.items()}
        return parts | {f"recurrent.{i}": state for i, state in held.recurrent.items()}

    def hold(self, tensors: Mapping[str, Tensor], length: int) -> None:
        """Hold what `state_tensors` gave behind a text of `length`, in as many rows as they have.

        Raises:
            ValueError: no layer of this kind has such states.
        """
        states: dict[str, dict[int, Tensor]] = {"conv": {}, "recurrent": {}}
        for name, tensor in tensors.items():
            kind, _, number = name.partition(".")
            is_known = kind in states and number.isdecimal() and int(number) < self.number_of_states
            if not is_known or tensor.ndim < 2:
                raise ValueError(name)
            states[kind][int(number)] = tensor
        every = [*states["conv"].values(), *states["recurrent"].values()]
        if sum(each.nbytes // each.shape[0] for each in every) != self._row_bytes:
            raise ValueError("sizes")
        widths = {i: state.shape[-1] for i, state in states["conv"].items()}
        self.hold_again(_Held(StateStep(length, 0), states["conv"], states["recurrent"], widths))
        self.device, self.dtype = every[0].device, every[0].dtype

    def stand_for(self, length: int) -> None:
        """Let the states now be those behind so many tokens, whatever they hold: for benchmarks."""
        self._step, self._before = StateStep(length, 0), None

    def forget_past(self) -> None:
        """Let go of the states before the last step: rows have changed."""
        self._before = None

    def clear(self) -> None:
        """Forget every token; another number of rows may follow."""
        self._checkpoints, self.stored_length = {}, None
        self.hold_again(_Held(StateStep(0, 0), {}, {}, {}))

    # Rows -------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        step, held = self._step, self._held().rows(beam_idx)
        self.hold_again(held)
        self._step = step
        self._checkpoints = {n: each.rows(beam_idx) for n, each in self._checkpoints.items()}

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in a row."""
        rows = next(iter(self._tensors())).shape[0]
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    # What the cache does for all layers -------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Done for all layers together by the cache."""

    def reset(self) -> None:
        """Done for all layers together by the cache."""

    def offload(self) -> None:
        """Nothing to do: states stay in fast memory."""

    def prefetch(self) -> None:
        """Nothing to do: states stay in fast memory."""
