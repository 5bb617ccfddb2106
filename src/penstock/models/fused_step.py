"""fused_parts(): a model's norms, gates and rotations in one launch each, for a step of one token.

A decode step of an 8B model is 30 launches a layer besides ours, most of them a few microseconds
for nothing: transformers writes a norm in seven, a rotation in ten. While a step is recorded as a
CUDA graph those parts are called that say the same in one (`kernels/device/elementwise.py`).

No list of models says which: a part is replaced where its own code gives, bit for bit, what the
kernel's twin gives on random numbers. What is another formula (Gemma's norm, a GELU, a rotation of
some dimensions) or is wrapped already stays.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.kernels.device.elementwise import (
    gated,
    gated_twin,
    rms_norm,
    rms_norm_twin,
    rotate,
    rotate_twin,
)

ENABLED = True
"""Whether steps are recorded so; false for ablations."""
_ROTATION = "apply_rotary_pos_emb"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def fused_parts(model: PreTrainedModel) -> Iterator[None]:
    """Put the kernels in, and take them out again; other threads' calls of this model get them too,
    and say the same.

    Args:
        model: on any device; on a CPU the kernels are their twins.
    """
    if not ENABLED:
        yield
        return
    with ExitStack() as undo:
        known: dict[type[nn.Module], bool] = {}
        sources = set()
        for module in model.modules():
            kind = type(module)
            sources.add(kind.__module__)
            if "forward" in module.__dict__:
                continue  # another wrapper is there
            make = _norm if is_norm(module) else _gate if _is_gate(module) else None
            if make is None:
                continue
            if kind not in known:
                known[kind] = says_the_same(module)
            if known[kind]:
                module.forward = make(module)
                undo.callback(module.__dict__.pop, "forward", None)
        for source in sources:
            names = vars(sys.modules.get(source, sys))
            own = names.get(_ROTATION)
            if callable(own) and _rotates_the_same(own, model):
                names[_ROTATION] = _rotation(own)
                undo.callback(names.__setitem__, _ROTATION, own)
        yield


def is_norm(module: Any) -> bool:
    """Whether a module has the parts of an RMSNorm; `says_the_same` tells whether it is Llama's."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, nn.Parameter)
        and weight.ndim == 1
        and weight.dtype in _DTYPES
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and sum(1 for _ in module.parameters()) == 1
    )


def _is_gate(module: Any) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(isinstance(getattr(module, part, None), nn.Module) for part in parts)


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    own = module.forward

    def forward(hidden_states: Tensor) -> Tensor:
        weight = module.weight
        if hidden_states.dtype != weight.dtype or not hidden_states.is_contiguous():
            normed: Tensor = own(hidden_states)
            return normed
        return rms_norm(hidden_states, weight, module.variance_epsilon)

    return forward


def _gate(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        gate, up = module.gate_proj(x), module.up_proj(x)
        down: Tensor = module.down_proj(gated(gate.contiguous(), up.contiguous()))
        return down

    return forward


def _rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype
        fits = cos.shape[-1] == q.shape[-1] == k.shape[-1] and cos.shape[0] in (1, q.shape[0])
        if args or kwargs or q.shape[2] != 1 or not (alike and fits and cos.ndim == 3):
            return own(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos.contiguous(), sin.contiguous())

    return apply


@torch.no_grad()
def says_the_same(module: Any) -> bool:
    """Whether a part's own code is the twin's, to the bit."""
    try:
        if is_norm(module):
            weight = module.weight
            states = _random((3, weight.shape[0]), weight)
            twin = rms_norm_twin(states, weight, module.variance_epsilon)
            return bool(torch.equal(module(states), twin))
        weight = module.gate_proj.weight
        states = _random((2, module.gate_proj.in_features), weight)
        twin = module.down_proj(gated_twin(module.gate_proj(states), module.up_proj(states)))
        return bool(torch.equal(module(states), twin))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False  # another kind of part, which merely has these names


@torch.no_grad()
def _rotates_the_same(own: Callable[..., Any], model: PreTrainedModel) -> bool:
    like = model.get_input_embeddings().weight
    query, key = _random((2, 3, 1, 16), like), _random((2, 2, 1, 16), like)
    cos, sin = _random((2, 1, 16), like), _random((2, 1, 16), like)
    try:
        found = own(query, key, cos, sin)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    twins = rotate_twin(query, key, cos, sin)
    return (
        isinstance(found, tuple)
        and len(found) == len(twins)
        and all(torch.equal(mine, twin) for mine, twin in zip(found, twins, strict=True))
    )


def _random(size: tuple[int, ...], like: Tensor) -> Tensor:
    """The same numbers each time, whatever the device's generator stands at."""
    draw = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=draw).to(like.device, like.dtype)
