"""ValueSum: the values of all tokens of a layer, added up."""

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.kernels.plain_attention import NEGATIVE_INFINITY

PIECE_TOKENS = 32
"""Values that are in float32 at a time."""


class ValueSum:
    """Values of a layer's first `tokens` tokens, padding left out, in float32.

    Tokens that are taken away again leave rounding errors of float32 behind: a few millionths of
    the mean.
    """

    def __init__(self, rows: int, shape: KVShape, device: torch.device) -> None:
        self.tokens = 0
        """How many it is of, padding counted."""
        self._sum = torch.zeros(rows, shape.num_kv_heads, shape.value_width, device=device)
        self._count = torch.zeros(rows, device=device)

    @staticmethod
    def num_bytes(rows: int, shape: KVShape) -> int:
        """Of one layer, for the ledger."""
        return 4 * rows * (shape.num_kv_heads * shape.value_width + 1)

    @staticmethod
    def scratch_bytes(rows: int, shape: KVShape) -> int:
        """Temporaries of one call, for the ledger."""
        return 4 * rows * (2 * PIECE_TOKENS + 4) * shape.num_kv_heads * shape.value_width

    def add(self, values: Tensor, visible: Tensor | None) -> None:
        """Take in the tokens that come next.

        Args:
            values: [rows, kv_heads, tokens, value_width]
            visible: False at padding; None when nothing is padded. bool [rows, tokens]
        """
        self._put(values, visible, 1)

    def take_away(self, values: Tensor, visible: Tensor | None) -> None:
        """Forget the newest tokens; arguments as in `add`."""
        self._put(values, visible, -1)

    def _put(self, values: Tensor, visible: Tensor | None, sign: int) -> None:
        count = values.shape[2]
        self.tokens += sign * count
        if visible is None:
            self._sum.add_(values.sum(dim=2, dtype=torch.float32), alpha=sign)
            self._count.add_(sign * count)
        else:
            self._sum.add_(_sum_of(values, visible), alpha=sign)
            self._count.add_(visible.sum(dim=1), alpha=sign)

    def mean_without(self, values: Tensor, mask: Tensor) -> Tensor:
        """The mean of all values but some; zero where none are left.

        Args:
            values: those to leave out, and others. [rows, kv_heads, places, value_width]
            mask: 0 at those to leave out, minus infinity elsewhere. [rows, places]

        Returns:
            float32 [rows, kv_heads, value_width]
        """
        out = mask > NEGATIVE_INFINITY
        left = (self._count - out.sum(dim=1)).clamp_min(1)
        mean = (self._sum - _sum_of(values, out)) / left[:, None, None]
        return mean * (self._count > out.sum(dim=1))[:, None, None]

    def state(self) -> Tensor:
        """Of the first row, for `load_state`. float32 [kv_heads, value_width]"""
        return self._sum[0].clone()

    def load_state(self, state: Tensor, tokens: int) -> bool:
        """Become, in every row, what `state` was taken from; no token is padding.

        Args:
            state: may come from a file; nothing of it is believed.
            tokens: that it is of.

        Returns:
            Whether it is one; nothing is changed otherwise.
        """
        fits = state.dtype == torch.float32 and state.shape == self._sum.shape[1:]
        if not fits or not bool(state.isfinite().all()):
            return False
        self._sum.copy_(state.to(self._sum.device).expand_as(self._sum))
        self._count.fill_(tokens)
        self.tokens = tokens
        return True

    def take_rows_from(self, other: "ValueSum", rows: Tensor) -> None:
        """Become a copy with row i taken from row `rows[i]`."""
        self._sum, self._count = other._sum[rows].clone(), other._count[rows].clone()
        self.tokens = other.tokens

    def reset(self) -> None:
        """Be of nothing."""
        self._sum.zero_()
        self._count.zero_()
        self.tokens = 0


def _sum_of(values: Tensor, which: Tensor) -> Tensor:
    """Of some places. float32 [rows, kv_heads, value_width]"""
    total = values.new_zeros(*values.shape[:2], values.shape[3], dtype=torch.float32)
    parts = torch.split(values, PIECE_TOKENS, dim=2)
    pieces = zip(parts, torch.split(which, PIECE_TOKENS, dim=1), strict=True)
    for part, shown in pieces:
        total += torch.einsum("rkpd,rp->rkd", part.float(), shown.float())
    return total
