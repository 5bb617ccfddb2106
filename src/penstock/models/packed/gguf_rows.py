"""A GGUF file's matrices as rows of ours: 4- and 8-bit blocks keep their codes.

Block layouts: ggml's `ggml-common.h` and `ggml-quants.c`, `dequantize_row_*`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.packed_weights import GROUP, Int4Matrix, Int8Matrix
from penstock.models.packed.form import Form
from penstock.models.packed.rows import RowSource

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Whose tensors are transformers' own but for names, and llama's order of queries and keys."""
_FOUR, _EIGHT = ("Q4_0", "Q4_1", "Q4_K"), ("Q8_0",)


class GgufRows:
    """A matrix of a GGUF file."""

    def __init__(self, stored: Any, order: Tensor | None) -> None:
        """Take a tensor of gguf's reader.

        Args:
            order: which of its rows is ours; None: the same. [rows]
        """
        self._stored, self._order = stored, order
        self.shape = (int(stored.shape[1]), int(stored.shape[0]))
        self._kind = str(stored.tensor_type.name)
        self.form: Form | None = None
        if self._kind in _FOUR and Int4Matrix.fits(*self.shape):
            self.form = Form(4, GROUP)
        elif self._kind in _EIGHT and Int8Matrix.fits(*self.shape):
            self.form = Form(8)

    def _rows(self, first: int, end: int) -> Any:
        rows = self._stored.data.reshape(self.shape[0], -1)
        if self._order is None:
            return rows[first:end]
        return rows[self._order[first:end].numpy()]

    def codes(self, first: int, end: int) -> tuple[Tensor, ...]:
        """As of `RowSource`."""
        rows = torch.from_numpy(self._rows(first, end).copy())
        return _DECODERS[self._kind](rows)

    def plain(self, first: int, end: int) -> Tensor:
        """As of `RowSource`, by gguf's own decoders."""
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(self._rows(first, end), self._stored.tensor_type).copy())


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(data: Tensor) -> Tensor:
    """Low halves, then high ones. [..., n] to [..., 2 * n]"""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _q4_0(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 18)
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, torch.zeros_like(scale)


def _q4_1(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 20)
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 4:]), scale, _half(blocks, 2) + 8 * scale


def _q4_k(rows: Tensor) -> tuple[Tensor, ...]:
    """Eight groups of 32 share a scale and a least value, of which each has a share of 6 bits."""
    blocks = rows.view(len(rows), -1, 144)
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    shares = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=-1)
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=-1)
    scale = _half(blocks, 0)[..., None] * shares
    offset = 8 * scale - _half(blocks, 2)[..., None] * least
    codes = _nibbles(blocks[..., 16:].reshape(len(rows), -1, 4, GROUP))
    return codes.view(len(rows), -1, GROUP), scale.flatten(1), offset.flatten(1)


def _q8_0(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 34)
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0)


_DECODERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q8_0": _q8_0
}  # fmt: skip


def file_rows(
    reader: Any, config: Any, names: Iterable[str]
) -> tuple[dict[str, RowSource], dict[str, Callable[[], Tensor]]]:
    """A file's matrices, and its other tensors, by the names that transformers gives.

    Args:
        reader: gguf's, of the file.
        config: of the model, as transformers reads it from the file.
        names: of the model's parameters.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    known = get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    matrices: dict[str, RowSource] = {}
    others: dict[str, Callable[[], Tensor]] = {}
    for name in names:
        stem, kind = name.rpartition(".")[::2]
        tensor = stored.get(f"{known.get_name(stem)}.{kind}")
        if tensor is None:
            continue
        order = _order_of(name, config)
        if len(tensor.shape) == 2:
            matrices[name] = GgufRows(tensor, order)
        else:
            others[name] = _getter(tensor, order)
    return matrices, others


def _getter(tensor: Any, order: Tensor | None) -> Callable[[], Tensor]:
    def get() -> Tensor:
        values = torch.from_numpy(tensor.data.copy())
        return values if order is None else values[order]

    return get


def _order_of(name: str, config: Any) -> Tensor | None:
    """Llama's queries and keys: a file has the two of each rotation beside each other."""
    heads = {
        "q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads
    }.get(name.split(".")[-2])  # fmt: skip
    if config.model_type != "llama" or heads is None:
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.arange(heads * width).view(heads, width // 2, 2).transpose(1, 2).flatten()
