"""Form: in how many bits a matrix is kept, and how many input columns share a scale."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.packed_weights import GROUP, Int4Matrix, Int8Matrix, PackedMatrix


class Form(NamedTuple):
    """8 bits with a scale, or 4 bits with a scale and an offset, per group of columns."""

    bits: int
    group: int = 0
    """0 for 8 bits, whose groups are of one size."""

    @classmethod
    def fitting(cls, bits: int, rows: int, width: int, group: int = GROUP) -> "Form | None":
        """The form of a matrix, 8 bits where 4 do not fit; None where it has to stay plain."""
        if bits == 4 and Int4Matrix.fits(rows, width, group):
            return cls(4, group)
        return cls(8) if Int8Matrix.fits(rows, width) else None

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of a row, scales counted."""
        if self.bits == 4:
            return Int4Matrix.row_bytes(width, dtype, self.group)
        return Int8Matrix.row_bytes(width, dtype)

    def pack(self, weight: Tensor, dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
        """A plain matrix [rows, width], packed: uint8 [rows, row_bytes].

        Args:
            importance: of input columns, for 4 bits; None: all the same. [width]
        """
        if self.bits == 4:
            return Int4Matrix.pack(weight, dtype, self.group, importance)
        return Int8Matrix.pack(weight, dtype)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, PackedMatrix]:
        """Packed weights to be filled, and the look at them."""
        if self.bits == 4:
            return Int4Matrix.empty(rows, width, dtype, self.group)
        return Int8Matrix.empty(rows, width, dtype)

    def view(self, packed: Tensor, width: int, dtype: torch.dtype) -> PackedMatrix:
        """What `pack` gave, for products."""
        if self.bits == 4:
            return Int4Matrix(packed, width, dtype, self.group)
        return Int8Matrix(packed, width, dtype)
