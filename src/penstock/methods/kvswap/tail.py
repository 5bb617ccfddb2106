"""ValueSums: the sum of a layer's values, of which the mean of what is not attended to is made."""

import torch
from torch import Tensor


class ValueSums:
    """Values of all visible tokens of a layer, added up by row and KV head.

    What a crop or a stored text changes is not seen here; then the sums are unknown, until they
    are begun anew and added up from the store.
    """

    def __init__(self, rows: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        """Sums of no token."""
        self.total = torch.zeros(rows, kv_heads, head_dim, device=device)
        self.tokens = torch.zeros(rows, device=device)
        """Summands of each row. [rows]"""
        self.known = True

    def begin(self) -> None:
        """No token is added up."""
        self.total.zero_()
        self.tokens.zero_()
        self.known = True

    def add(self, values: Tensor, visible: Tensor | None) -> None:
        """Add tokens.

        Args:
            values: [rows, kv_heads, tokens, head_dim]
            visible: False at padding; None: none is padding. bool [rows, tokens]
        """
        values = values.float()
        if visible is None:
            self.tokens += values.shape[2]
        else:
            self.tokens += visible.sum(dim=1)
            values = values * visible[:, None, :, None]
        self.total += values.sum(dim=2)

    def mean_without(self, values: Tensor, shown: Tensor) -> Tensor:
        """The mean of all but some tokens; 0 where there are no others.

        Args:
            values: of those, and of anything else. [rows, kv_heads, places, head_dim]
            shown: which are those. bool [rows, places]

        Returns:
            float32 [rows, kv_heads, head_dim]
        """
        weights = shown.float()
        inside = torch.einsum("rkpd,rp->rkd", values.float(), weights)
        others = (self.tokens - weights.sum(dim=1)).clamp_min(0)[:, None, None]
        return torch.where(others > 0, (self.total - inside) / others.clamp_min(1), 0.0)

    def take_rows_from(self, other: "ValueSums", rows: Tensor) -> None:
        """Become a copy with row i taken from row `rows[i]`."""
        self.total, self.tokens = other.total[rows].clone(), other.tokens[rows].clone()
        self.known = other.known
