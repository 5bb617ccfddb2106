"""gather_pieces() in Triton: host addresses are read and written by the kernel itself."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 2048
_PROGRAMS = 64
"""Enough to fill a link; more would take the multiprocessors from what computes meanwhile."""


@triton.jit
def _copy(
    addresses, slots, index, tiles, tiles_of_piece, slot_words,
    TO_HOST: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program p of P copies tiles p, p + P, ... of the pieces."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        piece = tile // tiles_of_piece
        offsets = tile % tiles_of_piece * WORDS + tl.arange(0, WORDS)
        inside = offsets < slot_words
        there = tl.load(addresses + piece).to(tl.pointer_type(tl.int64)) + offsets
        here = slots + tl.load(index + piece) * slot_words + offsets
        if TO_HOST:
            tl.store(there, tl.load(here, mask=inside, other=0), mask=inside)
        else:
            tl.store(here, tl.load(there, mask=inside, other=0), mask=inside)


def gather_pieces_triton(addresses: Tensor, slots: Tensor, index: Tensor, *, to_host: bool) -> None:
    """`gather_pieces` in Triton."""
    words = slots.view(torch.int64)
    tiles_of_piece = triton.cdiv(words.shape[1], _WORDS)
    tiles = addresses.shape[0] * tiles_of_piece
    if tiles:
        _copy[(min(tiles, _PROGRAMS),)](
            addresses, words, index, tiles, tiles_of_piece, words.shape[1],
            TO_HOST=to_host, WORDS=_WORDS, num_warps=8,
        )  # fmt: skip
