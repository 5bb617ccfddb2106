"""RollingWindow: the newest units and the sinks, which are always resident."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.kernels.put_token import PutToken


class RollingWindow:
    """Sinks and the newest units of one layer, behind the slots of a pool.

    KVSwap's rolling buffer (section 3.4.1), held by whole units: the window keeps the last
    `window_slots` started units, the newest usually unfinished. A token's place follows from its
    position alone, so writing is two copies and nothing ever moves.

        [0, sink_slots * G)                         the row's first units that are not padding
        [sink_slots * G, (sink_slots + window_slots) * G)   unit u at slot u % window_slots

    With S = ceil(length / G) started units:

        [0, first_window_unit)        closed units: on disk, indexed, maybe in a slot (or a sink)
        [first_window_unit, S)        in the window; all but perhaps the last are closed too

    A sink unit is visible only after it has left the window, so that no token is seen twice.
    """

    def __init__(
        self, tokens: Tensor, mask: Tensor, *, group_tokens: int, sink_slots: int,
        window_slots: int, shape: KVShape | None = None,
    ) -> None:  # fmt: skip
        """Lay the window over the places behind a pool's slots.

        Args:
            tokens: [batch, (sink_slots + window_slots) * G, *token_size]
            mask: the same places, additive. [batch, (sink_slots + window_slots) * G]
            shape: of the tokens; None: they are [.., 2, kv_heads, head_dim].
        """
        assert window_slots >= 2, "the window holds a closed unit beside the unfinished one"
        self.tokens = tokens
        self.mask = mask
        self._put: Callable[[Tensor, Tensor, int], None]
        if shape is None or shape.is_even:
            self.keys, self.values = tokens[:, :, 0], tokens[:, :, 1]
            self._put = PutToken(tokens, mask)
        else:
            self.keys, self.values = shape.keys_of(tokens), shape.values_of(tokens)
            self._put = self._put_uneven
        self.group_tokens = group_tokens
        self.sink_slots = sink_slots
        self.window_slots = window_slots
        self._window_start = sink_slots * group_tokens
        batch = tokens.shape[0]
        self._start_unit = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
        self._end_of_sinks = sink_slots
        self._visible: Tensor | None = None

    def first_window_unit(self, length: int) -> int:
        """The oldest unit that the window holds when the sequence has `length` tokens."""
        return max(0, -(-length // self.group_tokens) - self.window_slots)

    def window_slot(self, unit: int) -> int:
        """The slot of a unit, counted from the start of the window."""
        return self.sink_slots + unit % self.window_slots

    def window_places(self, positions: Tensor) -> Tensor:
        """Places of positions that are in the window, counted from the start of the window."""
        unit, offset = positions // self.group_tokens, positions % self.group_tokens
        return self._window_start + unit % self.window_slots * self.group_tokens + offset

    def write_one(self, keys: Tensor, values: Tensor, position: int) -> None:
        """Write one decoded token.

        Args:
            keys: [batch, kv_heads, 1, head_dim]
            values: [batch, kv_heads, 1, value_width]
            position: cache position of the token.
        """
        unit, offset = divmod(position, self.group_tokens)
        place = self.window_slot(unit) * self.group_tokens + offset
        if offset == 0:
            self.mask[:, place : place + self.group_tokens] = NEGATIVE_INFINITY
            if self.first_window_unit(position + 1) <= self._end_of_sinks:
                self.show_sinks(position + 1)
        self._put(keys, values, place)
        if unit < self._end_of_sinks:
            self._write_sinks(keys, values, position, position + 1)

    def _put_uneven(self, keys: Tensor, values: Tensor, place: int) -> None:
        """What `PutToken` does, for the widths that its kernel does not know."""
        self.keys[:, place] = keys[:, :, 0]
        self.values[:, place] = values[:, :, 0]
        self.mask[:, place] = 0.0

    def write_many(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Write those of the new tokens that the sinks and the window keep; then call `refresh`.

        Args:
            keys: [batch, kv_heads, tokens, head_dim]
            values: [batch, kv_heads, tokens, value_width]
            start: cache position of the first new token.
        """
        end = start + keys.shape[2]
        kept = max(start, self.first_window_unit(end) * self.group_tokens)
        positions = torch.arange(kept, end, device=keys.device)
        places = self.window_places(positions)
        self.keys[:, places] = keys[:, :, kept - start :].transpose(1, 2)
        self.values[:, places] = values[:, :, kept - start :].transpose(1, 2)
        self._write_sinks(keys, values, start, end)

    def set_start_units(self, start_unit: Tensor, last: int | None = None) -> None:
        """Say where each row begins (left padding).

        Args:
            start_unit: int64 [batch]
            last: the greatest of them, where the host knows it.
        """
        self._start_unit = start_unit
        last = int(start_unit.max()) if last is None else last
        self._end_of_sinks = last + self.sink_slots

    def _write_sinks(self, keys: Tensor, values: Tensor, start: int, end: int) -> None:
        if self.sink_slots == 0 or start >= self._end_of_sinks * self.group_tokens:
            return  # finding out below waits for a GPU
        offsets = torch.arange(self._window_start, device=keys.device)
        positions = self._start_unit[:, None] * self.group_tokens + offsets
        rows, places = torch.nonzero((positions >= start) & (positions < end), as_tuple=True)
        if len(rows):
            source = positions[rows, places] - start
            self.keys[rows, places] = keys[rows, :, source]
            self.values[rows, places] = values[rows, :, source]

    def show_sinks(self, length: int) -> None:
        """Show the sink units that have left the window of a sequence of `length` tokens."""
        if self.sink_slots == 0:
            return
        offsets = torch.arange(self._window_start, device=self.mask.device)
        positions = self._start_unit[:, None] * self.group_tokens + offsets
        shown = positions < self.first_window_unit(length) * self.group_tokens
        if self._visible is not None:
            known = self._visible.shape[1]
            safe = positions.clamp(max=known - 1)
            shown = shown & (self._visible.gather(1, safe) | (positions >= known))
        self.mask[:, : self._window_start] = torch.where(shown, 0.0, NEGATIVE_INFINITY).to(
            self.mask.dtype
        )

    def refresh(self, length: int, visible: Tensor | None) -> None:
        """Rebuild the mask from the sequence's length and padding.

        Args:
            length: tokens in the sequence, all of the window's written.
            visible: bool, False at padding, None when there is none. [batch, >= length]
        """
        slots = torch.arange(self.window_slots, device=self.mask.device)
        last = -(-length // self.group_tokens) - 1
        units = last - (last - slots) % self.window_slots
        offsets = torch.arange(self.group_tokens, device=self.mask.device)
        positions = (units[:, None] * self.group_tokens + offsets).reshape(-1)
        shown = ((positions >= 0) & (positions < length)).expand(self.mask.shape[0], -1)
        if visible is not None:
            safe = positions.clamp(0, max(length - 1, 0))
            shown = shown & visible[:, safe]
        self.mask[:, self._window_start :] = torch.where(shown, 0.0, NEGATIVE_INFINITY).to(
            self.mask.dtype
        )
        self._visible = visible
        self.show_sinks(length)

    def see(self, visible: Tensor | None) -> None:
        """Know of padding that is to be hidden; `read_back` comes before the next use.

        Args:
            visible: as in `refresh`.
        """
        self._visible = visible

    def read_back(self, tokens: Tensor, length: int) -> None:
        """Fill sinks and window from where all tokens are, and rebuild the mask.

        Args:
            tokens: [batch, at least `length`, *token_size]
            length: tokens in the sequence, at least 1.
        """
        first, device = self.first_window_unit(length) * self.group_tokens, tokens.device
        places = self.window_places(torch.arange(first, length, device=device))
        self.tokens[:, places] = tokens[:, first:length]
        if self.sink_slots:
            offsets = torch.arange(self._window_start, device=device)
            positions = self._start_unit[:, None] * self.group_tokens + offsets
            rows = torch.arange(len(self.tokens), device=device)[:, None]
            self.tokens[:, : self._window_start] = tokens[rows, positions.clamp(max=length - 1)]
        self.refresh_cropped(length)

    def refresh_cropped(self, length: int) -> None:
        """Rebuild the mask after the sequence was cut to `length` tokens."""
        visible = None
        if self._visible is not None and length > 0:
            visible = self._visible[:, :length]
            missing = length - visible.shape[1]
            visible = torch.nn.functional.pad(visible, (0, missing), value=True)
        self.refresh(length, visible)

    def take_rows_from(self, other: "RollingWindow", rows: Tensor) -> None:
        """Take over the bookkeeping of another window's rows; tokens and mask are the caller's."""
        self._start_unit = other._start_unit[rows]
        self._end_of_sinks = other._end_of_sinks
        self._visible = None if other._visible is None else other._visible[rows]
