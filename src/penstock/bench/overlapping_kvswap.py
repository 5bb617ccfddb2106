"""KVSwap over a synthetic stream of selections: a stated share is the previous step's."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.selection import Selection
from penstock.indexes.base import KeyIndex
from penstock.indexes.low_rank import LowRankIndex
from penstock.policies.base import IndexRequest, top_units
from penstock.policies.kvswap import KVSwap

PAPER_OVERLAP = 0.77
"""Share of the selected groups that the step before had selected too (KVSwap section 3.4.3)."""


class _RememberingIndex(LowRankIndex):
    """Scores as its parent; remembers the last selection, for the stream."""

    last: NDArray[np.int64] | None = None
    """Units of the step before. [batch, wanted]"""
    draw: np.random.Generator


@dataclass(frozen=True, kw_only=True)
class OverlappingKVSwap(KVSwap):
    """KVSwap whose selections overlap from step to step as those of a trained model do.

    Queries of a model with random weights point anywhere, so its selections hardly overlap and a
    reuse buffer looks useless. Here `overlap` of a step's groups are drawn from the previous
    selection, the rest are the best of all others by the real scores. All work is real, the scores
    are computed; only which groups win is synthetic. For measurements of speed, never of quality.
    """

    overlap: float = PAPER_OVERLAP
    """Share of each selection that repeats the one before, in [0, 1]."""
    stream_seed: int = 0

    def make_index(self, request: IndexRequest) -> KeyIndex:
        """See `SelectionPolicy.make_index`."""
        assert self.rank is not None, "plan() makes the choices"
        assert self.index_bits is not None
        index = _RememberingIndex(
            request.shape, batch=request.batch, max_groups=request.max_groups,
            group_tokens=request.group_tokens, rank=self.rank, bits=self.index_bits,
            head_reduction=self.head_reduction, scaling=request.scaling, adapter=request.adapter,
            device=request.device,
        )  # fmt: skip
        index.draw = np.random.default_rng(self.stream_seed)
        return index

    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        """See `SelectionPolicy.select`."""
        assert isinstance(index, _RememberingIndex)
        scores = index.score(query, end_unit)
        last = index.last
        if last is None or last.shape[1] < wanted:
            selection = top_units(scores, first_unit, wanted)
        else:
            count = round(self.overlap * wanted)
            order = index.draw.permuted(last, axis=1)
            taken = torch.from_numpy(last).to(scores.device)
            scores = scores.scatter(1, taken, float("-inf"))
            fresh = top_units(scores, first_unit, wanted - count)
            kept = np.concatenate([order[:, :count], fresh.unit_ids], axis=1)
            selection = Selection(np.sort(kept, axis=1), None)
        index.last = selection.unit_ids if selection.valid is None else None
        return selection
