"""RowPositions: where the tokens of each row stand, in models whose pictures take several axes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import CacheStateError


class Block(NamedTuple):
    """Tokens whose positions are not one behind the other: a picture, a video, or padding."""

    start: int
    """First of them in the row, padding counted."""
    end: int
    """Behind the last one; `start` where positions jump alone."""
    text: int
    """Position of a token of text behind it."""


class RowPositions:
    """The position of the next token of each row of a cache (M-RoPE, arXiv 2409.12191, 2.1).

    A picture of h x w tokens moves the positions behind it by max(h, w). transformers keeps the
    difference between place and position, one number a row, on the model (`rope_deltas`), where the
    next prompt of any cache replaces it. Here it belongs to the cache's rows.

    Behind the last block positions go up by one with each token, as they do in one prompt and in
    one call of `generate`; so decoding changes nothing here. transformers of 2026 gives the text
    behind a long video smaller numbers than the video's last frames, and a second call of
    `generate` numbers above those; a second turn here goes on as the first one did.
    """

    def __init__(self) -> None:
        self._rows: list[list[Block]] = []
        self._deltas: Tensor | None = None
        """What positions stand behind places, while no block comes or goes. [rows, 1]"""

    # What rows hold ---------------------------------------------------------------------------

    def blocks(self, row: int, length: int) -> list[Block]:
        """The blocks that begin in front of a row's token `length`, in order."""
        held = self._rows[row] if row < len(self._rows) else []
        return [block for block in held if block.start < length]

    def hold(self, rows: Sequence[Sequence[Block]]) -> None:
        """Make these the blocks of all rows."""
        self._rows, self._deltas = [list(blocks) for blocks in rows], None

    def crop(self, length: int) -> None:
        """Forget blocks that begin at or behind the token `length`."""
        self.hold([self.blocks(row, length) for row in range(len(self._rows))])

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        if self._rows:
            self.hold([self._rows[row] for row in rows.tolist()])

    def require_rows(self, count: int, length: int) -> None:
        """Have so many rows that hold `length` tokens; what is known behind those is forgotten."""
        if length == 0 or len(self._rows) != count:
            self.hold([[]] * count)
        else:
            self.crop(length)

    def next_at(self, row: int, length: int) -> int:
        """Position of a token of text behind `length` tokens.

        Raises:
            CacheStateError: that is within a picture.
        """
        held = self.blocks(row, length)
        if not held:
            return length
        last = held[-1]
        if length < last.end:
            raise CacheStateError(
                f"the cache ends within a picture, which is tokens {last.start:,} to {last.end:,} "
                f"of row {row}; crop it to {last.start:,}, and give the whole picture again"
            )
        return last.text + length - last.end

    # Steps ------------------------------------------------------------------------------------

    def of_step(
        self, length: int, shape: tuple[int, int], given: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Positions of a step's tokens, in place of those that the model has made.

        Pictures' are the model's own. Text's are made here: a model that does not know the cache
        makes them of the newest prompt's difference.

        Args:
            length: tokens held before the step.
            shape: rows, and tokens of the step.
            given: those that the model made. int64 [axes, rows, tokens], with the place in front of
                the axes or not; or [rows, tokens].
            mask: 0 at padding. [rows, held and new tokens]

        Returns:
            int64 [axes, rows, tokens]

        Raises:
            CacheStateError: the cache ends within a picture.
        """
        rows, count = shape
        if count == 1 and length and self._deltas is not None and len(self._deltas) == rows:
            return _with_places(given, self._deltas + length, shape)
        self.require_rows(rows, length)
        seen = None if mask is None else mask[:, length : length + count].bool().cpu()
        padding = [0] * rows if seen is None else (~seen).sum(dim=1).tolist()
        for row, amount in enumerate(padding):
            if amount:  # on the left alone
                self._rows[row].append(Block(length, length + amount, 0))
        if given is not None and _is_of_pictures(given, shape, padding):
            axes = given[-3:].cpu()
            for row, amount in enumerate(padding):
                at = length + amount
                own = axes[:, row, amount:]
                self._rows[row] += blocks_of(own, start=at, text=self.next_at(row, at))
            return given
        begins = [
            -amount if amount else self.next_at(row, length) for row, amount in enumerate(padding)
        ]
        begin = torch.tensor(begins)[:, None]
        if not any(padding):
            self._deltas = begin - length
        return _with_places(given, (begin + torch.arange(count)).clamp_min(0), shape)


def blocks_of(axes: Tensor, *, start: int, text: int) -> list[Block]:
    """The blocks in a row's positions.

    Args:
        axes: int64 [axes, tokens]
        start: place of the first of these tokens.
        text: position of a token of text in its place.
    """
    count = axes.shape[1]
    alike, places = (axes == axes[:1]).all(dim=0).tolist(), axes[0].tolist()
    found: list[Block] = []
    at = free = 0
    while at < count:
        if alike[at] and places[at] == text:
            text, at = text + 1, at + 1
            continue
        begin, end = max(at - 1, free), at  # a picture's first token is alike on all axes
        while end < count and not _is_text(alike, places, end):
            end += 1
        text = places[end] if end < count else int(axes[:, :end].max()) + 1
        found.append(Block(start + begin, start + end, text))
        at = free = end
    return found


def _is_text(alike: list[bool], places: list[int], at: int) -> bool:
    """Whether a token is alike on all axes, and the next goes on from it; single ones of a video
    are alike too."""
    if at + 1 == len(places):
        return alike[at]
    return alike[at] and alike[at + 1] and places[at + 1] == places[at] + 1


def _is_of_pictures(given: Tensor, shape: tuple[int, int], padding: Sequence[int]) -> bool:
    """Whether positions are other than a text's: not alike on all axes, or not in a row."""
    if given.dim() != 3 or given.shape[0] < 3 or tuple(given.shape[1:]) != shape:
        return False
    for row, amount in enumerate(padding):
        axes = given[-3:, row, amount:]
        if not torch.equal(axes, axes[:1].expand_as(axes)):
            return True
        if not bool((axes[0, 1:] == axes[0, :-1] + 1).all()):
            return True
    return False


def _with_places(given: Tensor | None, positions: Tensor, shape: tuple[int, int]) -> Tensor:
    """The same on three axes, behind the places that the model gave, if it gave any."""
    rows, count = shape
    axes = positions[None].expand(3, rows, count)
    if given is None or tuple(given.shape) != (4, rows, count):
        return axes
    return torch.cat([given[:1], axes.to(given.device)])
