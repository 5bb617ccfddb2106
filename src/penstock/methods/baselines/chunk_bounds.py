"""ChunkBoundsIndex: bounds of large chunks of keys, and of the small ones within them."""

import torch
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.key_index import KeyIndex

BRANCHES = 8
"""Fine chunks in a coarse one."""
REFINED_SHARE = 4
"""Coarse chunks that are looked into hold so many times the tokens of a selection."""


class ChunkBoundsIndex(KeyIndex):
    """Scores chunks coarse to fine by the largest product that any key of theirs could have.

    A chunk's abstract is the smallest and the largest of each key component. All coarse chunks are
    scored; those with the highest bounds are opened and their fine chunks scored. Units take their
    fine chunk's score, or in chunks left closed their coarse one's, put below every opened one.

    Source: after LeoAM (arXiv 2506.20187), whose chunks vary in size with the skew of attention
    and whose importance comes from an abstract of each chunk. The bound itself is Quest's (arXiv
    2406.10774, section 3.2); added over heads, it is linear in the abstracts.
    """

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, group_tokens: int, fine_units: int,
        selected_units: int, device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the bounds of both levels.

        Args:
            fine_units: units of a fine chunk.
            selected_units: units of a selection, which decides how many chunks are opened.
        """
        self._shape = shape
        self._group_tokens, self._fine_units = group_tokens, fine_units
        self._opened = opened_chunks(selected_units, fine_units)
        fine, coarse = chunk_counts(max_units, fine_units)
        size = (2, batch, fine, shape.joint_dim)
        self._fine = torch.zeros(size, dtype=shape.dtype, device=device)
        size = (2, batch, coarse, shape.joint_dim)
        self._coarse = torch.zeros(size, dtype=shape.dtype, device=device)

    @staticmethod
    def num_bytes(shape: KVShape, *, batch: int, max_units: int, fine_units: int) -> int:
        """Bytes of one layer's bounds, for the ledger."""
        chunks = sum(chunk_counts(max_units, fine_units))
        return 2 * batch * chunks * shape.joint_dim * shape.dtype.itemsize

    @staticmethod
    def scratch_bytes(
        shape: KVShape, *, batch: int, max_units: int, fine_units: int, selected_units: int
    ) -> int:
        """Temporaries of one call of `score`: bounds in float32, and scores of all units."""
        _, coarse = chunk_counts(max_units, fine_units)
        opened = min(coarse, opened_chunks(selected_units, fine_units)) * BRANCHES
        bounds = 4 * coarse + (4 + 2 * shape.dtype.itemsize) * opened
        scores = 20 * BRANCHES * coarse + 4 * max_units
        return batch * (bounds * shape.joint_dim + scores)

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        """Chunks grow as their units close."""
        units = keys.reshape(keys.shape[0], -1, self._group_tokens, self._shape.joint_dim)
        low, high = units.amin(dim=2), units.amax(dim=2)
        first = first_token // self._group_tokens
        for level, size in ((self._fine, self._fine_units), (self._coarse, self._coarse_units)):
            _merge(level[0], low, first, size, smallest=True)
            _merge(level[1], high, first, size, smallest=False)

    @property
    def _coarse_units(self) -> int:
        return self._fine_units * BRANCHES

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """Query heads of all KV heads of the row are added."""
        rows, shape = query.shape[0], self._shape
        grouped = query.view(rows, shape.num_kv_heads, -1, shape.head_dim).float()
        above = grouped.clamp_min(0).sum(dim=2).view(rows, -1, 1)
        below = grouped.clamp_max(0).sum(dim=2).view(rows, -1, 1)
        coarse_count = -(-num_units // self._coarse_units)
        fine_count = -(-num_units // self._fine_units)
        low, high = self._coarse[:, :, :coarse_count]
        coarse = torch.matmul(high.float(), above).add_(torch.matmul(low.float(), below))[..., 0]
        opened = coarse.topk(min(self._opened, coarse_count), dim=1).indices
        branches = torch.arange(BRANCHES, device=query.device)
        chunks = (opened.unsqueeze(2) * BRANCHES + branches).flatten(1)
        # The last coarse chunk may have branches that are not there yet.
        present = chunks < fine_count
        inside = torch.where(present, chunks, opened.repeat_interleave(BRANCHES, dim=1) * BRANCHES)
        row = torch.arange(rows, device=query.device).unsqueeze(1)
        fine = torch.matmul(self._fine[1][row, inside].float(), above)
        fine = fine.add_(torch.matmul(self._fine[0][row, inside].float(), below))[..., 0]
        gap = fine.amin(dim=1, keepdim=True) - coarse.amax(dim=1, keepdim=True)
        closed = coarse + gap - 1.0
        scores = closed.repeat_interleave(BRANCHES, dim=1)
        scores.scatter_(1, chunks, fine)
        return scores.repeat_interleave(self._fine_units, dim=1)[:, :num_units].contiguous()

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        assert isinstance(other, ChunkBoundsIndex)
        for mine, theirs in ((self._fine, other._fine), (self._coarse, other._coarse)):
            for bounds, source in zip(mine, theirs, strict=True):
                bounds.copy_(source[rows])


def chunk_counts(max_units: int, fine_units: int) -> tuple[int, int]:
    """Fine and coarse chunks of `max_units` units; coarse ones have all their branches."""
    coarse = -(-max_units // (fine_units * BRANCHES))
    return coarse * BRANCHES, coarse


def opened_chunks(selected_units: int, fine_units: int) -> int:
    """Coarse chunks that a step looks into."""
    return max(2, -(-REFINED_SHARE * selected_units // (fine_units * BRANCHES)))


def _merge(bounds: Tensor, units: Tensor, first: int, size: int, *, smallest: bool) -> None:
    """Extend chunks of `size` units by bounds of units, in place.

    A chunk that the first unit begins is made anew; one that it continues keeps what it has.

    Args:
        bounds: [batch, chunks, joint_dim]
        units: [batch, new_units, joint_dim]
        first: unit that the new ones begin with.
    """
    chunk, before = divmod(first, size)
    after = -(before + units.shape[1]) % size
    none = float("inf") if smallest else float("-inf")
    padded = torch.nn.functional.pad(units, (0, 0, before, after), value=none)
    by_chunk = padded.view(units.shape[0], -1, size, units.shape[2])
    merged = by_chunk.amin(dim=2) if smallest else by_chunk.amax(dim=2)
    if before:
        reduce = torch.minimum if smallest else torch.maximum
        merged[:, 0] = reduce(merged[:, 0], bounds[:, chunk])
    bounds[:, chunk : chunk + merged.shape[1]] = merged
