"""Where a model's weights are: plain tensors in memory, packed by a quantiser, or offloaded."""

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.models.packed.modules import PackedModule, packed_modules

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(module: nn.Module, *names: str) -> bool:
    """Whether a module's weights may be read instead of calling it.

    Not where accelerate brings them when the module is called, where hooks or another `forward`
    do more than the class says, or where a tensor is of a kind of its own (torchao).
    """
    if hasattr(module, "_hf_hook") or "forward" in vars(module):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    weights = [getattr(module, name, None) for name in names or ("weight",)]
    return all(
        weight is None or (type(weight) in _PLAIN and weight.device.type != "meta")
        for weight in weights
    )


def model_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: the device of its embeddings, also while they are offloaded.

    Raises:
        UnsupportedModelError: the embeddings have no memory and nothing brings them.
    """
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type != "meta":
        return device
    for hook in _hooks(embeddings):
        place = getattr(hook, "execution_device", None)
        if place is not None:
            return torch.device(f"cuda:{place}" if isinstance(place, int) else place)
    raise UnsupportedModelError(
        f"the embeddings of {type(model).__name__} are on the meta device, without values; load "
        "its weights first"
    )


def readable_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every entry of a model's state by name, in order of name, one at a time.

    What accelerate has offloaded is read from where it is; what a quantiser packed comes as the
    plain tensors that it is made of, their names behind its own. So do our packed weights, in an
    order of their codes that is the same on every machine.

    Raises:
        UnsupportedModelError: an entry cannot be read; names it.
    """
    offloaded: dict[str, tuple[Any, str]] | None = None
    packed = packed_modules(model)
    for name, weight in sorted(_state_of(model).items()):
        path, _, own = name.rpartition(".")
        if path in packed and own in packed[path].forms:
            yield from _packed_parts(name, packed[path], own)
            continue
        if not isinstance(weight, Tensor):
            raise UnsupportedModelError(
                f"{name} of {type(model).__name__} is no tensor ({type(weight).__name__}), so that "
                "two models cannot be told apart by it; use a model without it"
            )
        if weight.device.type == "meta":
            offloaded = _offloaded(model) if offloaded is None else offloaded
            weight = _fetched(model, name, offloaded)
        yield from plain_parts(name, weight)


def readable_weight(model: PreTrainedModel, name: str, weight: Tensor) -> Tensor:
    """A parameter or buffer with its values, wherever they are.

    Raises:
        UnsupportedModelError: it cannot be read; names it.
    """
    return _fetched(model, name, _offloaded(model)) if weight.device.type == "meta" else weight


def persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a model's state, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _state_of(model: PreTrainedModel) -> dict[str, Any]:
    """As `state_dict`, which damages a model of bitsandbytes that has run on some CPUs.

    Its 4-bit layers repack themselves in their first call, and are restored by `state_dict` as
    something else (0.50): their next call computes with wrong scales.
    """
    if not any(_is_four_bit(module) for module in model.modules()):
        return dict(model.state_dict())
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        at = f"{prefix}." if prefix else ""
        if not _is_four_bit(module):
            module._save_to_state_dict(found, at, keep_vars=False)
            continue
        bias = getattr(module, "bias", None)
        found[f"{at}weight"] = module.weight
        if bias is not None:
            found[f"{at}bias"] = bias
    return found


def _is_four_bit(module: nn.Module) -> bool:
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def plain_parts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight as plain tensors: itself, or those that a quantiser's class is made of."""
    if getattr(weight, "quant_state", None) is not None:
        yield from _four_bit_parts(name, weight)
        return
    if type(weight) in _PLAIN or not hasattr(weight, "__tensor_flatten__"):
        yield name, weight
        return
    inner, _ = weight.__tensor_flatten__()
    for each in inner:
        yield from plain_parts(f"{name}.{each}", getattr(weight, each))


def _four_bit_parts(name: str, weight: Any) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales of a weight of bitsandbytes, the same before and behind its first call."""
    codes, state = weight.data, weight.quant_state
    scales = state.absmax
    if getattr(state, "packing_format_for_cpu", False):
        functional: Any = importlib.import_module("bitsandbytes.functional")
        scales = scales.T
        restored = copy.copy(state)
        restored.original_nested = False  # its scales are known already
        codes, _ = functional._convert_weight_packed_for_cpu_inverse(codes, restored)
    elif getattr(state, "nested", False):
        functional = importlib.import_module("bitsandbytes.functional")
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    yield f"{name}.codes", codes.view(torch.uint8).reshape(-1, 1)
    yield f"{name}.scales", scales.reshape(-1, 1).to(torch.bfloat16)


def _packed_parts(name: str, module: PackedModule, own: str) -> Iterator[tuple[str, Tensor]]:
    for which, matrix in enumerate(module.matrices(own)):
        codes, scales = matrix.content()
        yield f"{name}.{which}.int{matrix.bits}", codes
        yield f"{name}.{which}.scales", scales


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on a module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return []
    return list(getattr(hook, "hooks", None) or [hook])


def _offloaded(model: PreTrainedModel) -> dict[str, tuple[Any, str]]:
    """By name of a weight: accelerate's map, and the weight's name in it."""
    found: dict[str, tuple[Any, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for hook in _hooks(module):
            weights = getattr(hook, "weights_map", None)
            if weights is None:
                continue
            below = bool(getattr(hook, "place_submodules", False))
            for name in [*_names(module, below=below)]:
                found[f"{prefix}.{name}" if prefix else name] = (weights, name)
    return found


def _names(module: nn.Module, *, below: bool) -> Iterator[str]:
    for name, _ in module.named_parameters(recurse=below, remove_duplicate=False):
        yield name
    for name, _ in module.named_buffers(recurse=below, remove_duplicate=False):
        yield name


def _fetched(model: PreTrainedModel, name: str, offloaded: dict[str, tuple[Any, str]]) -> Tensor:
    weights, key = offloaded.get(name, ({}, name))
    try:
        weight: Tensor = weights[key]
    except KeyError:
        raise UnsupportedModelError(
            f"the values of {name} of {type(model).__name__} are nowhere to be read (it is on the "
            "meta device), so that two models cannot be told apart by it; load it first"
        ) from None
    return weight
