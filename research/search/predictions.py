"""Prediction: what the transfer model says that each step of a variant loads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.shape import KVShape
from penstock.search.transfer_estimate import Parents, with_shared_blocks
from penstock.search.transfer_model import step_by_step, token_by_token
from research.search.variants import SearchCase, Variant

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """Bytes into fast memory, by step.

    Layer-wise, that is Eq. 1-3 token by token; `block_bytes` is what the same equations give for
    an engine that loads blocks once they are full. Group by group it is convention "start" of
    Eq. 4 and 5, or, where beams share loads, the estimate for the very survivors of the walk.
    """

    case: SearchCase
    groups: Int64Array
    """[steps]"""
    step_bytes: Int64Array | None = None
    """[steps]"""
    token_bytes: Int64Array | None = None
    """[new_tokens]"""
    block_bytes: Int64Array | None = None
    """[new_tokens]"""

    def loaded(self, step: int, tokens: int) -> int:
        """Of the first `tokens` tokens of a step; group by group, of the step."""
        if self.step_bytes is not None:
            return int(self.step_bytes[step])
        return self._sum(self.token_bytes, step, tokens)

    def in_blocks(self, step: int, tokens: int) -> int | None:
        """Layer-wise, of full blocks alone."""
        return None if self.block_bytes is None else self._sum(self.block_bytes, step, tokens)

    def _sum(self, each: Int64Array | None, step: int, tokens: int) -> int:
        assert each is not None
        first = step * self.case.step_tokens
        return int(each[first : first + tokens].sum())

    @property
    def offloads(self) -> NDArray[np.bool_]:
        """Steps in which not everything fits into fast memory. bool [steps]"""
        if self.step_bytes is not None:
            return self.groups > 1
        tokens = self.case.step_tokens
        return np.array([self.loaded(step, tokens) > 0 for step in range(self.case.num_steps)])

    @property
    def total_bytes(self) -> int:
        """Of the whole search."""
        each = self.token_bytes if self.step_bytes is None else self.step_bytes
        assert each is not None
        return int(each.sum())


def predict(
    case: SearchCase, variant: Variant, shape: KVShape, memory_bytes: int, parents: Parents
) -> Prediction:
    """What a variant loads.

    Args:
        memory_bytes: its fast memory for KV.
        parents: of the walk.

    Raises:
        BudgetError: fast memory does not hold one beam.
    """
    request = case.transfers(shape, memory_bytes)
    one = np.ones(case.num_steps, dtype=np.int64)
    if variant.strategy == "resident":
        return Prediction(case=case, groups=one, step_bytes=0 * one)
    if variant.strategy == "layerwise":
        return Prediction(
            case=case, groups=one, token_bytes=token_by_token(request).loaded_bytes,
            block_bytes=_full_blocks(case, shape, memory_bytes),
        )  # fmt: skip
    if not variant.overlap:
        made = step_by_step(request, "start")
    else:
        made = with_shared_blocks(request, parents=parents, settings=variant.schedule)
    return Prediction(case=case, groups=made.groups, step_bytes=made.loaded_bytes)


def _full_blocks(case: SearchCase, shape: KVShape, memory_bytes: int) -> Int64Array:
    """Eq. 1-3 of full blocks: a block is loaded from the token behind its last one on; the block
    that is written in stays, and layers make room when a block is full or a step begins."""
    new = np.arange(case.new_tokens, dtype=np.int64)
    full = (case.prompt_tokens + new) // case.block_tokens
    starts = case.prompt_tokens + new // case.step_tokens * case.step_tokens
    held = np.maximum(full, -(-starts // case.block_tokens))
    piece = case.block_tokens * shape.token_bytes
    slots = memory_bytes // piece
    kept = np.minimum(shape.num_layers, slots // (case.beams * np.maximum(1, held)))
    kept = np.minimum.accumulate(kept)
    return (shape.num_layers - kept) * case.beams * full * piece
