"""How transformers loads a model with packed weights: its own loading, with modules of ours.

Plain weights are packed one parameter at a time, as they are read: no more than one of them is in
memory. Packed ones are taken as they lie in a file.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from penstock.models.packed.form import Form
from penstock.models.packed.modules import (
    PackedEmbedding,
    PackedLinear,
    PackedModule,
    packed_experts,
    quicken_norms,
)
from penstock.models.query_projection import decoder_layers

_EIGHT_BIT_NAMES = ("k_proj", "v_proj")
"""Where few heads share keys and values, these are a few percent of a layer, and in 4 bits half of
what its rounding costs (research/notes/2026-11-26-packed-weights.md)."""
METHOD = "penstock"
"""Of `quantization_config`."""
_PLAIN_NAMES = ("gate", "router", "kv_b_proj")
"""Linear layers that choose experts: small, and a wrong choice costs more than their bytes. And the
one whose weights `models.latents` reads."""


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which bits a model's weights are in."""

    def __init__(
        self, bits: int = 8, forms: Mapping[str, list[int]] | None = None, origin: str = "",
        **_: Any,
    ) -> None:  # fmt: skip
        """Say it.

        Args:
            bits: 4 or 8, of the decoder's layers.
            forms: bits and group of modules that are in others.
            origin: the format that they were in before, such as "gptq"; empty: plain.
        """
        self.quant_method = METHOD
        self.bits = bits
        self.forms = dict(forms or {})
        self.origin = origin
        self.importance: dict[str, Tensor] = {}
        """Of input columns, by module; see `calibrate`."""
        self.on_packed: Callable[[Tensor], None] | None = None
        """Called with each plain weight that has been packed."""

    def to_dict(self) -> dict[str, Any]:
        """What lasts of it."""
        made = {"bits": self.bits, "forms": dict(self.forms), "origin": self.origin}
        return {"quant_method": METHOD, **made}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """As items of `to_dict`."""
        yield from self.to_dict().items()


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces modules before loading, and packs what is read into them."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config = self.quantization_config
        replace_modules(model, config.bits, config.forms, ready=self.pre_quantized)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        quicken_norms(model)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether it is a packed module's weight."""
        path, name = param_name.rpartition(".")[::2]
        module = model.get_submodule(path)
        return isinstance(module, PackedModule) and name in module.forms

    def get_quantize_ops(self) -> ConversionOps:
        """What packs."""
        return _Pack(self)

    def is_serializable(self, **_: Any) -> bool:
        """Its files are ours alone; see `kept_model`."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Never."""
        return False


class _Pack(ConversionOps):  # type: ignore[misc]
    """A plain weight in, a packed one out."""

    def __init__(self, quantizer: PackedQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *_: Any, model: Any = None, **__: Any
    ) -> dict[str, Tensor]:
        """Each weight that is kept packed, packed."""
        made = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path, name = key.rpartition(".")[::2]
            if self._quantizer.param_needs_quantization(model, key):
                config = self._quantizer.quantization_config
                important = config.importance.get(path)
                plain, weight = weight, model.get_submodule(path).pack(name, weight, important)
                if config.on_packed is not None:
                    config.on_packed(plain)
            made[key] = weight
        return made


def replace_modules(
    model: PreTrainedModel, bits: int, forms: Mapping[str, list[int]], *, ready: bool
) -> None:
    """Put packed modules into a model on "meta": layers, experts, embeddings and the output layer.

    A module whose weights the model's code reads by itself, instead of calling it, stays.

    Args:
        forms: as of `PackedConfig`.
        ready: its weights will come packed.
    """
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    names = {module: name for name, module in model.named_modules()}

    def form_of(module: nn.Module, rows: int, width: int, ours: int) -> Form | None:
        said = forms.get(names[module])
        if said is not None:
            return Form(*said) if said[0] in (4, 8) else None
        return Form.fitting(ours, rows, width)

    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            packed_experts(parent, bits, dtype, ready=ready)
            for name, child in list(parent.named_children()):
                if type(child) is not nn.Linear or name in _PLAIN_NAMES or _reads(parent, name):
                    continue
                small = name in _EIGHT_BIT_NAMES and 2 * child.out_features <= child.in_features
                ours = 8 if small else bits
                form = form_of(child, child.out_features, child.in_features, ours)
                if form is not None:
                    setattr(parent, name, PackedLinear(child, form, dtype, ready=ready))
    _replace_ends(model, form_of, dtype, ready=ready)


def _replace_ends(model: Any, form_of: Any, dtype: torch.dtype, *, ready: bool) -> None:
    """Embeddings and the output layer, in 8 bits; both or none where they are one."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    made: dict[nn.Module, PackedModule] = {}
    if type(embedding) is nn.Embedding:
        form = form_of(embedding, embedding.num_embeddings, embedding.embedding_dim, 8)
        if form is not None and form.bits == 8:
            made[embedding] = PackedEmbedding(embedding, form, dtype, ready=ready)
    tied = bool(model.config.get_text_config(decoder=True).tie_word_embeddings)
    if type(output) is nn.Linear and (embedding in made or not tied):
        form = form_of(output, output.out_features, output.in_features, 8)
        if form is not None:
            made[output] = PackedLinear(output, form, dtype, ready=ready)
    if tied and len(made) < 2:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])


def _reads(parent: nn.Module, name: str) -> bool:
    """Whether a module's code reads the weight of its part of a name."""
    kind: Any = type(parent)
    source = _source(kind)
    return source is None or f"self.{name}.weight" in source


@cache
def _source(kind: type) -> str | None:
    """The code of a class, if it can be had; `inspect` takes milliseconds to find it."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return None
