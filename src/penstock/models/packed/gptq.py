"""GPTQ's and AWQ's folders: 4-bit codes in safetensors, as rows of ours.

Formats: AutoGPTQ's and GPTQModel's "gptq" (zeros less one) and "gptq_v2"; AutoAWQ's "gemm".
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.core.errors import UnsupportedModelError
from penstock.kernels.packed_weights import Int4Matrix
from penstock.models.packed.form import Form
from penstock.models.packed.rows import PlainRows, RowSource

METHODS = ("gptq", "awq")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of 32 bits AutoAWQ's "gemm" keeps each of eight outputs."""
_CODES = (".qweight", ".qzeros", ".scales", ".g_idx")
_SPLIT = (128, 64, 32)


def check_readable(said: Mapping[str, Any]) -> None:
    """Refuse what is in another number of bits or another layout.

    Args:
        said: `quantization_config` of the folder.

    Raises:
        UnsupportedModelError: names it.
    """
    method, bits = said.get("quant_method"), said.get("bits", said.get("w_bit"))
    if bits != 4:
        raise UnsupportedModelError(
            f"{method} weights in {bits} bits are not read on a CPU; take the plain model with "
            "weights='int8'"
        )
    version = str(said.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        raise UnsupportedModelError(
            f"AWQ weights in the layout {version!r} are not read on a CPU; take those of gemm"
        )


class PackedRows:
    """A matrix of such a folder; its rows are the columns of the file's words."""

    def __init__(
        self, words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None, *, awq: bool,
        zero_shift: int,
    ) -> None:  # fmt: skip
        """Take a layer's tensors.

        Args:
            words: int32 [width / 8, rows] of GPTQ, [width, rows / 8] of AWQ
            zeros: int32 [groups, rows / 8]
            scales: [groups, rows]
            order: group of each input column, of GPTQ. [width]
            zero_shift: what the file left out of its zeros.
        """
        groups, rows = scales.shape
        width = words.shape[0] * (1 if awq else 8)
        self.shape = (rows, width)
        self._words, self._zeros, self._scales = words, zeros, scales
        self._awq, self._zero_shift = awq, zero_shift
        group = width // groups
        plain_order = torch.arange(width) // group
        self._order = plain_order if order is None else order.long()
        self._group = next((size for size in _SPLIT if group % size == 0), 0)
        known = bool(self._group) and torch.equal(self._order, plain_order)
        fits = known and Int4Matrix.fits(rows, width, self._group)
        self.form = Form(4, self._group) if fits else None

    def codes(self, first: int, end: int) -> tuple[Tensor, ...]:
        """As of `RowSource`; a group that is longer than torch's operator likes is split."""
        plain, scale, offset = self._parts(first, end)
        repeats = self.shape[1] // len(self._scales) // self._group
        return (
            plain.view(end - first, -1, self._group),
            scale.repeat_interleave(repeats, dim=1), offset.repeat_interleave(repeats, dim=1),
        )  # fmt: skip

    def plain(self, first: int, end: int) -> Tensor:
        """As of `RowSource`."""
        codes, scale, offset = self._parts(first, end)
        return (codes.float() - 8) * scale[:, self._order] + offset[:, self._order]

    def _parts(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [rows, width], scales and offsets [rows, groups] of some rows."""
        if self._awq:
            codes = _spread(self._words[:, first // 8 : -(-end // 8)], _AWQ_ORDER)
            codes = codes[:, first % 8 : first % 8 + end - first].t()
        else:
            columns = self._words[:, first:end].t()
            codes = _spread(columns.contiguous(), range(8))
        order = _AWQ_ORDER if self._awq else range(8)
        zeros = _spread(self._zeros[:, first // 8 : -(-end // 8)], order)
        zeros = zeros[:, first % 8 : first % 8 + end - first].t().float() + self._zero_shift
        scale = self._scales[:, first:end].t().float()
        return codes.contiguous(), scale, (8 - zeros) * scale


def _spread(words: Tensor, order: Any) -> Tensor:
    """Eight codes of each word, beside each other. [n, m] to uint8 [n, 8 * m]"""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    spread = words[..., None] >> shifts & 15
    return spread.to(torch.uint8).flatten(1)


def folder_rows(
    folder: Path, said: Mapping[str, Any]
) -> tuple[dict[str, RowSource], dict[str, Callable[[], Tensor]]]:
    """A folder's matrices, and its other tensors, by the names that transformers gives.

    Args:
        said: its `quantization_config`.
    """
    places: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file: Any = safe_open(path, framework="pt")
        places |= dict.fromkeys(file.keys(), file)
    awq = said.get("quant_method") == "awq"
    zero_shift = 0 if awq or said.get("checkpoint_format") == "gptq_v2" else 1
    matrices: dict[str, RowSource] = {}
    others: dict[str, Callable[[], Tensor]] = {}
    for name, file in places.items():
        stem = name.rpartition(".")[0]
        if name.endswith(".qweight"):
            words, zeros, scales = (
                places[stem + part].get_tensor(stem + part) for part in _CODES[:3]
            )
            order = f"{stem}.g_idx"
            matrices[f"{stem}.weight"] = PackedRows(
                words, zeros, scales, places[order].get_tensor(order) if order in places else None,
                awq=awq, zero_shift=zero_shift,
            )  # fmt: skip
        elif not name.endswith(_CODES):
            stored = file.get_slice(name)
            if len(stored.get_shape()) == 2:
                matrices[name] = PlainRows(stored)
            else:
                others[name] = _getter(file, name)
    return matrices, others


def _getter(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)
