"""gather_pieces(): pieces scattered over pinned host memory, to or from slots on the device."""

import ctypes

import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton


def gather_pieces(addresses: Tensor, slots: Tensor, index: Tensor, *, to_host: bool) -> None:
    """Copy piece i between host address `addresses[i]` and slot `index[i]`, in one launch.

    The device's kernel reads (or writes) host memory itself, so that a thousand scattered pieces
    cost one launch instead of a thousand copies.

    Args:
        addresses: of pinned memory, each good for a slot's bytes, multiples of 16. int64 [pieces]
        slots: contiguous; a slot is a multiple of 16 bytes. uint8 [num_slots, slot_bytes]
        index: distinct where written to. int64 [pieces]
        to_host: write the slots to the addresses instead of the other way round.
    """
    if uses_triton(slots):
        from penstock.kernels.device.gather_pieces_triton import gather_pieces_triton

        gather_pieces_triton(addresses, slots, index, to_host=to_host)
    else:
        gather_pieces_twin(addresses, slots, index, to_host=to_host)


def gather_pieces_twin(addresses: Tensor, slots: Tensor, index: Tensor, *, to_host: bool) -> None:
    """The meaning of `gather_pieces`, one copy a piece."""
    slot_bytes = slots.shape[1]
    for address, slot in zip(addresses.tolist(), index.tolist(), strict=True):
        memory = (ctypes.c_uint8 * slot_bytes).from_address(address)
        there = torch.frombuffer(memory, dtype=torch.uint8)
        if to_host:
            there.copy_(slots[slot])
        else:
            slots[slot].copy_(there)
