"""Int8Matrix and Int4Matrix: a linear layer's weights in few bits, packed for a CPU's products.

Each is one uint8 tensor [rows, bytes]: the codes of the whole matrix in its first bytes, the scales
in its last. One tensor has one name in a model's state, and a file that holds it can be mapped.

Two ways give a product. A few tokens (a decode step) read the codes alone, through kernels of ours:
torch's 8-bit operator knows one scale a row and takes twice as long, its 4-bit one 1.6 times. The
latter stands in where vectors are others. More tokens (a prompt) go through plain matrices of a
tile of rows at a time: the packed operators take 2 to 3 times as long there as the plain matrix.
"""

import functools
import sys
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.native.compiled import kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES
from penstock.kernels.packed_codes import best_codes, symmetric_codes

GROUP = 32
"""Input columns that share a scale; in 4 bits unless a file says otherwise."""
GROUP_SIZES = (32, 64, 128, 256)
"""What torch's 4-bit operator takes."""
BLOCK = 64
"""Rows that its codes are interleaved by where vectors have 512 bits, half as many elsewhere; a
matrix fits everywhere or nowhere."""
FEW_ROWS = 16
"""Tokens up to which the packed operators are faster."""
_TILE_ELEMENTS = 1 << 20
"""Of a plain tile: it stays in a second-level cache, and is long enough for a product."""
_PACKING_ELEMENTS = 1 << 17


class Int8Matrix:
    """A scale per group of 32 input columns, symmetric; see `symmetric_codes`."""

    bits: ClassVar[int] = 8

    def __init__(self, packed: Tensor, width: int, dtype: torch.dtype) -> None:
        """Look at packed weights.

        Args:
            packed: uint8 [rows, row_bytes(width, dtype)], as `pack` gives.
            width: input columns.
            dtype: of the scales, and of the plain tiles.
        """
        self.rows, self.width, self.dtype = packed.shape[0], width, dtype
        flat = packed.reshape(-1)
        size = self.rows * width
        self.codes = flat[:size].view(torch.int8).view(self.rows, width)
        """int8 [rows, width]"""
        self.scales = flat[size:].view(dtype).view(self.rows, width // GROUP)
        """[rows, groups]"""

    @staticmethod
    def fits(rows: int, width: int) -> bool:
        """Whether a matrix of these sizes can be kept so."""
        return width % GROUP == 0 and rows % 4 == 0

    @staticmethod
    def row_bytes(width: int, dtype: torch.dtype) -> int:
        """Bytes of a row with its scales."""
        return width + width // GROUP * dtype.itemsize

    @classmethod
    def empty(cls, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, "Int8Matrix"]:
        """Packed weights to be filled, and the look at them."""
        packed = torch.empty(rows, cls.row_bytes(width, dtype), dtype=torch.uint8)
        return packed, cls(packed, width, dtype)

    @classmethod
    def pack(cls, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A plain matrix as packed weights.

        Args:
            weight: [rows, width], of any float dtype.
            dtype: of the scales.

        Returns:
            uint8 [rows, row_bytes]
        """
        rows, width = weight.shape
        packed, made = cls.empty(rows, width, dtype)
        step = packing_rows(width)
        for first in range(0, rows, step):
            made.put_plain(first, weight[first : first + step])
        return packed

    def put_plain(self, first: int, weight: Tensor) -> None:
        """Pack some rows, from `first` on. [count, width]"""
        wide = weight.float().view(len(weight), -1, GROUP)
        self.put(first, *symmetric_codes(wide, self.dtype))

    def put(self, first: int, codes: Tensor, scale: Tensor) -> None:
        """Write rows of codes that are known already.

        Args:
            first: row.
            codes: int8 [rows, groups, 32]
            scale: [rows, groups]
        """
        end = first + len(codes)
        self.codes[first:end] = codes.flatten(1)
        self.scales[first:end] = scale.to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T`.

        Args:
            x: [tokens, width] in `dtype`.

        Returns:
            [tokens, rows]
        """
        if x.device.type != "cpu":
            return self.twin(x)
        compiled = kernel("int8_groups")
        if len(x) > FEW_ROWS or compiled is None or self.dtype not in DTYPE_CODES:
            return _by_tiles(self, x)
        wide = x.float().contiguous()
        out = torch.empty(len(x), self.rows)
        compiled(
            wide.data_ptr(), self.codes.data_ptr(), self.scales.data_ptr(),
            DTYPE_CODES[self.dtype], len(x), self.width, self.rows, out.data_ptr(),
        )  # fmt: skip
        return out.to(x.dtype)

    def plain(self, first: int, end: int) -> Tensor:
        """Some rows as a plain matrix. [end - first, width]"""
        codes = self.codes[first:end].to(self.dtype).view(end - first, -1, GROUP)
        return codes.mul_(self.scales[first:end, :, None]).view(end - first, self.width)

    def rows_at(self, ids: Tensor) -> Tensor:
        """Plain rows by number. int64 [...] to [..., width]"""
        codes = self.codes[ids].to(self.dtype).view(*ids.shape, -1, GROUP)
        return codes.mul_(self.scales[ids][..., None]).flatten(-2)

    def transposed(self, first: int, end: int) -> Tensor:
        """As `plain`, turned. [width, end - first]"""
        return self.plain(first, end).t()

    def twin(self, x: Tensor) -> Tensor:
        """The meaning of a call in plain torch."""
        codes = self.codes.float().view(self.rows, -1, GROUP)
        weight = codes.mul_(self.scales.float()[..., None]).view(self.rows, self.width)
        return torch.nn.functional.linear(x.float(), weight).to(x.dtype)

    def content(self) -> tuple[Tensor, Tensor]:
        """Codes and scales in an order that is the same on every machine."""
        return self.codes, self.scales


class Int4Matrix:
    """A scale and an offset per group of input columns: weight = (code - 8) * scale + offset."""

    bits: ClassVar[int] = 4

    def __init__(self, packed: Tensor, width: int, dtype: torch.dtype, group: int = GROUP) -> None:
        """Look at packed weights.

        Args:
            packed: uint8 [rows, row_bytes(width, dtype, group)], as `pack` gives.
            width: input columns.
            dtype: of scales and offsets, and of the plain tiles.
            group: input columns that share them.
        """
        self.rows, self.width, self.dtype, self.group = packed.shape[0], width, dtype, group
        flat = packed.reshape(-1)
        size = self.rows * width // 2
        self.codes = flat[:size].view(self.rows, width // 2)
        """Two codes a byte, interleaved as torch's operator of this machine wants it."""
        self._is_native = dtype == torch.bfloat16 and code_order() == _NATIVE_ORDER
        self.scales = flat[size:].view(dtype).view(width // group, self.rows, 2)
        """Scale and offset. [groups, rows, 2]"""

    @staticmethod
    def fits(rows: int, width: int, group: int = GROUP) -> bool:
        """Whether a matrix of these sizes can be kept so."""
        return rows % BLOCK == 0 and width % group == 0 and group in GROUP_SIZES

    @staticmethod
    def row_bytes(width: int, dtype: torch.dtype, group: int = GROUP) -> int:
        """Bytes of a row with its scales and offsets."""
        return width // 2 + width // group * 2 * dtype.itemsize

    @classmethod
    def empty(
        cls, rows: int, width: int, dtype: torch.dtype, group: int = GROUP
    ) -> tuple[Tensor, "Int4Matrix"]:
        """Packed weights to be filled, and the look at them."""
        packed = torch.empty(rows, cls.row_bytes(width, dtype, group), dtype=torch.uint8)
        return packed, cls(packed, width, dtype, group)

    @classmethod
    def pack(
        cls, weight: Tensor, dtype: torch.dtype, group: int = GROUP,
        importance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """A plain matrix as packed weights, with the scales that leave the least squared error.

        Args:
            weight: [rows, width], of any float dtype.
            dtype: of scales and offsets.
            group: input columns that share them.
            importance: what a column's squared error counts; None: all the same. float32 [width]

        Returns:
            uint8 [rows, row_bytes]
        """
        rows, width = weight.shape
        packed, made = cls.empty(rows, width, dtype, group)
        step = packing_rows(width)
        for first in range(0, rows, step):
            made.put_plain(first, weight[first : first + step], importance)
        return packed

    def put_plain(self, first: int, weight: Tensor, importance: Tensor | None = None) -> None:
        """Pack some rows, from `first` on; it and their number divide by `BLOCK`. [count, width]"""
        groups = weight.float().view(len(weight), -1, self.group)
        if importance is not None:
            importance = importance.view(-1, self.group)
        self.put(first, *best_codes(groups, self.dtype, importance))

    def put(self, first: int, codes: Tensor, scale: Tensor, offset: Tensor) -> None:
        """Write rows of codes that are known already, such as another format's.

        Args:
            first: row; divides by `BLOCK`, and so does their number.
            codes: 0 to 15. [rows, groups, group]
            scale, offset: [rows, groups]
        """
        end = first + len(codes)
        plain = codes.flatten(1).to(torch.int32)
        self.codes[first:end] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain, 1)
        self.scales[:, first:end, 0] = scale.t().to(self.dtype)
        self.scales[:, first:end, 1] = offset.t().to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T`.

        Args:
            x: [tokens, width] in `dtype`.

        Returns:
            [tokens, rows]
        """
        if x.device.type != "cpu":
            return self.twin(x)
        return self._few(x.contiguous()) if len(x) <= FEW_ROWS else _by_tiles(self, x)

    def _few(self, x: Tensor) -> Tensor:
        compiled = kernel("int4_groups")
        if compiled is None or not self._is_native:
            by_torch: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, self.codes, self.group, self.scales
            )
            return by_torch
        tokens = len(x)
        workspace = torch.empty(tokens * self.width * 9 // 4, dtype=torch.uint8)
        out = torch.empty(tokens, self.rows, dtype=x.dtype)
        compiled(
            x.data_ptr(), self.codes.data_ptr(), self.scales.data_ptr(), DTYPE_CODES[x.dtype],
            tokens, self.width, self.rows, self.group, workspace.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def transposed(self, first: int, end: int) -> Tensor:
        """Some rows as a plain matrix, turned; the compiled form of `transposed_twin`.

        Args:
            first, end: rows; both divide by `BLOCK`.

        Returns:
            [width, end - first]
        """
        compiled = kernel("unpack_int4")
        if compiled is None or not self._is_native or self.codes.device.type != "cpu":
            return self.transposed_twin(first, end)
        out = torch.empty(self.width, end - first, dtype=self.dtype)
        compiled(
            self.codes.data_ptr(), self.scales.data_ptr(), self.rows, self.width, self.group, first,
            end, out.data_ptr(),
        )  # fmt: skip
        return out

    def transposed_twin(self, first: int, end: int) -> Tensor:
        """The meaning of `transposed` in plain torch."""
        codes = self.codes_of(first, end).t().float().sub_(8)
        codes = codes.reshape(-1, self.group, end - first)
        scales = self.scales[:, None, first:end]
        weight = codes.mul_(scales[..., 0]).add_(scales[..., 1])
        return weight.to(self.dtype).view(self.width, end - first)

    def codes_of(self, first: int, end: int) -> Tensor:
        """Codes of some rows in their plain order, one a byte. [end - first, width]"""
        order = torch.tensor(code_order(), device=self.codes.device)
        packed = self.codes[first:end].reshape(-1, self.width, len(order) // 2)
        both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(2)
        plain = torch.empty_like(both).index_copy_(2, order, both)
        return plain.transpose(1, 2).reshape(end - first, self.width)

    def plain(self, first: int, end: int) -> Tensor:
        """Some rows as a plain matrix; both ends divide by `BLOCK`. [end - first, width]"""
        return self.transposed(first, end).t()

    def twin(self, x: Tensor) -> Tensor:
        """The meaning of a call in plain torch."""
        weight = self.transposed_twin(0, self.rows).float()
        return (x.float() @ weight).to(x.dtype)

    def content(self) -> tuple[Tensor, Tensor]:
        """Codes and scales in an order that is the same on every machine."""
        return self.codes_of(0, self.rows), self.scales


PackedMatrix: TypeAlias = Int8Matrix | Int4Matrix


def packing_rows(width: int) -> int:
    """Rows of a matrix that are packed at a time: their copies in float32 stay small."""
    return max(BLOCK, _PACKING_ELEMENTS // width // BLOCK * BLOCK)


def _by_tiles(matrix: PackedMatrix, x: Tensor) -> Tensor:
    """A product through plain tiles."""
    out = torch.empty(len(x), matrix.rows, dtype=x.dtype)
    step = max(BLOCK, _TILE_ELEMENTS // matrix.width // BLOCK * BLOCK)
    for first in range(0, matrix.rows, step):
        end = min(first + step, matrix.rows)
        torch.mm(x, matrix.transposed(first, end), out=out[:, first:end])
    return out


_NATIVE_ORDER = tuple(row for half in range(BLOCK // 2) for row in (half, half + BLOCK // 2))


@functools.cache
def code_order() -> tuple[int, ...]:
    """The row of each code of a block, low half of a byte first, as torch interleaves them here.

    Torch keeps the order to itself, and it depends on the processor's vectors: so it is asked,
    by packing each row's number in two parts.
    """
    rows = torch.arange(BLOCK, dtype=torch.int32)[:, None].expand(BLOCK, GROUP)
    found = torch.zeros(BLOCK, dtype=torch.int64)
    for shift in (0, 4):
        part = (rows >> shift & 15).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1)
        first = packed.reshape(-1, BLOCK // 2)[0].to(torch.int64)
        found += torch.stack([first & 15, first >> 4], dim=-1).flatten() << shift
    order = tuple(found.tolist())
    # In blocks of 32 rows the second half is the next column, of the same rows.
    return order if len(set(order)) == BLOCK else order[: BLOCK // 2]


def packing() -> str:
    """Names how codes are packed on this machine; files of another packing are made again."""
    order = "".join(map(chr, code_order())).encode().hex()
    return f"{sys.byteorder}-{order[:8]}-{order[-8:]}"
