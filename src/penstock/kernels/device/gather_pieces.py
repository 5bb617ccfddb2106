"""gather_pieces(): pieces scattered over pinned host memory, to or from rows on the device."""

import ctypes

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton


def gather_pieces(addresses: Tensor, rows: Tensor, index: Tensor, *, to_host: bool) -> None:
    """Copy piece i between host address `addresses[i]` and row `index[i]`, in one launch.

    The device's kernel reads (or writes) host memory itself, so that a thousand scattered pieces
    cost one launch instead of a thousand copies.

    Args:
        addresses: of pinned memory, each good for a row's bytes, multiples of 16. int64 [pieces]
        rows: contiguous; a row is a multiple of 16 bytes. uint8 [num_rows, row_bytes]
        index: distinct where written to. int64 [pieces]
        to_host: write the rows to the addresses instead of the other way round.
    """
    if uses_triton(rows):
        from penstock.kernels.device.gather_pieces_triton import gather_pieces_triton

        gather_pieces_triton(addresses, rows, index, to_host=to_host)
    else:
        gather_pieces_twin(addresses, rows, index, to_host=to_host)


def gather_pieces_twin(addresses: Tensor, rows: Tensor, index: Tensor, *, to_host: bool) -> None:
    """The meaning of `gather_pieces`, one copy a piece."""
    row_bytes = rows.shape[1]
    for address, row in zip(addresses.tolist(), index.tolist(), strict=True):
        memory = (ctypes.c_uint8 * row_bytes).from_address(address)
        there = torch.frombuffer(memory, dtype=torch.uint8)
        if to_host:
            there.copy_(rows[row])
        else:
            rows[row].copy_(there)
