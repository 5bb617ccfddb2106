"""RowSource: a matrix in a file, read some rows at a time, in the codes that it lies in."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from penstock.core.errors import ModelLoadError
from penstock.kernels.packed_weights import packing_rows
from penstock.models.model_class import auto_class
from penstock.models.packed.form import Form
from penstock.models.packed.modules import packed_modules
from penstock.models.packed.quantizer import PackedConfig, replace_modules


class RowSource(Protocol):
    """A matrix of a file."""

    shape: tuple[int, int]
    """Rows and width."""
    form: Form | None
    """The form that holds its codes as they are; None: there is none."""

    def codes(self, first: int, end: int) -> tuple[Tensor, ...]:
        """Rows as `put` of a packed matrix of `form` takes them."""
        ...

    def plain(self, first: int, end: int) -> Tensor:
        """Rows as numbers. [end - first, width]"""
        ...


class PlainRows:
    """A matrix that lies in a file as numbers."""

    form: Form | None = None

    def __init__(self, stored: Any) -> None:
        """Take a tensor, or a slice object of safetensors."""
        self._stored = stored
        size = stored.get_shape() if hasattr(stored, "get_shape") else stored.shape
        self.shape = (int(size[0]), int(size[1]))

    def codes(self, first: int, end: int) -> tuple[Tensor, ...]:
        """There are none."""
        raise NotImplementedError

    def plain(self, first: int, end: int) -> Tensor:
        """As of the protocol."""
        rows: Tensor = self._stored[first:end]
        return rows


def read_packed(source: RowSource, form: Form, dtype: torch.dtype) -> Tensor:
    """A matrix of a file in a form; its own codes where they are of that form.

    Returns:
        uint8 [rows, row_bytes]
    """
    rows, width = source.shape
    packed, matrix = form.empty(rows, width, dtype)
    step = packing_rows(width)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        if source.form == form:
            matrix.put(first, *source.codes(first, end))
        else:
            matrix.put_plain(first, source.plain(first, end))
    return packed


class _OnRead:
    """Stands for a tensor in a state until transformers' loading asks for its values."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, _: Any) -> Tensor:
        return self._make()

    def get_dtype(self) -> str:
        """As of a slice of safetensors: what is read is not to be cast."""
        return "U8"


def _in(dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
    return make().to(dtype)


def model_of_rows(
    matrices: Mapping[str, RowSource], others: Mapping[str, Callable[[], Tensor]],
    config: PretrainedConfig, packed: PackedConfig, dtype: torch.dtype,
) -> PreTrainedModel:  # fmt: skip
    """A model out of a file's matrices and other tensors, by the names that transformers gives.

    One matrix at a time is read. Those of a form that holds a module's codes are not made plain.

    Args:
        packed: bits of what has no form of its own; the forms of others are set in it.
        dtype: of all that is not packed, and of scales.

    Raises:
        ModelLoadError: weights are missing.
    """
    with torch.device("meta"):
        empty = auto_class(config).from_config(config, dtype=dtype)
    modules = dict(empty.named_modules())
    for name, source in matrices.items():
        path = name.removesuffix(".weight")
        if source.form is not None and (source.form.bits == 8 or packed.bits == 4):
            packed.forms[path] = list(source.form)
        if path not in modules:
            raise ModelLoadError(f"{name} is no weight of a {type(empty).__name__}")
    replace_modules(empty, packed.bits, packed.forms, ready=True)
    forms = {
        f"{path}.{own}": form
        for path, module in packed_modules(empty).items()
        for own, form in module.forms.items()
    }

    def read(name: str, source: RowSource) -> Tensor:
        form = forms.get(name)
        if form is None:
            return source.plain(0, source.shape[0]).to(dtype)
        made = read_packed(source, form, dtype)
        if packed.on_packed is not None:
            packed.on_packed(made)
        return made

    state = {name: partial(read, name, source) for name, source in matrices.items()}
    state |= {name: partial(_in, dtype, make) for name, make in others.items()}
    config.quantization_config = packed.to_dict()
    return _filled(type(empty), state, config, dtype)


def plain_model_of_rows(
    kind: type[PreTrainedModel], matrices: Mapping[str, RowSource],
    others: Mapping[str, Callable[[], Tensor]], config: PretrainedConfig, dtype: torch.dtype,
) -> PreTrainedModel:  # fmt: skip
    """As `model_of_rows`, with plain weights. `kind` is the model's class."""
    made: dict[str, Callable[[], Tensor]] = dict(others)
    for name, source in matrices.items():
        made[name] = partial(source.plain, 0, source.shape[0])
    state = {name: partial(_in, dtype, make) for name, make in made.items()}
    return _filled(kind, state, config, dtype)


def _filled(
    kind: type[PreTrainedModel], state: Mapping[str, Callable[[], Tensor]],
    config: PretrainedConfig, dtype: torch.dtype,
) -> PreTrainedModel:  # fmt: skip
    """A model whose tensors are made one at a time, as transformers' loading comes to them."""
    model, info = kind.from_pretrained(
        None, config=config, state_dict={name: _OnRead(make) for name, make in state.items()},
        dtype=dtype, output_loading_info=True,
    )  # fmt: skip
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"the weights are incomplete, {len(missing)} tensors are missing ({missing[0]}, ...)"
        )
    found: PreTrainedModel = model.eval()
    return found
