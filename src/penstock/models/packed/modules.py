"""Modules in place of a model's own, with weights in few bits.

Each packed weight is one uint8 parameter under the name that the plain one had, so that names of a
state, tying and loading stay transformers' own.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.packed_weights import PackedMatrix
from penstock.kernels.query_steps import rms_norm
from penstock.models.fused_step import is_norm, says_the_same
from penstock.models.packed.form import Form

_FEW_NUMBERS = 1 << 16
"""Elements up to which a norm is one call, on one thread."""


class PackedModule(nn.Module):
    """What modules with packed weights share."""

    forms: dict[str, Form]
    """Of each packed parameter."""
    widths: dict[str, int]
    """Input columns of each."""
    packed_dtype: torch.dtype

    def _expect(
        self, name: str, sizes: tuple[int, ...], form: Form, dtype: torch.dtype, *, ready: bool
    ) -> None:
        """Make room for a weight on "meta": packed already if `ready`, else plain as it is read.

        Args:
            sizes: of the plain weight, [rows, width] or [matrices, rows, width].
        """
        shape = (*sizes[:-1], form.row_bytes(sizes[-1], dtype)) if ready else sizes
        empty = torch.empty(shape, dtype=torch.uint8 if ready else dtype, device="meta")
        setattr(self, name, nn.Parameter(empty, requires_grad=False))
        self.forms[name], self.widths[name] = form, sizes[-1]

    def pack(self, name: str, weight: Tensor, importance: Tensor | None = None) -> Tensor:
        """A plain weight of this module, packed. uint8 [..., rows, row_bytes]

        Args:
            importance: of a matrix's input columns; None: all the same. [width]
        """
        form, dtype = self.forms[name], self.packed_dtype
        if weight.ndim == 2:
            return form.pack(weight, dtype, importance)
        return torch.stack([form.pack(each, dtype) for each in weight])

    def matrix(self, name: str, which: int = 0) -> PackedMatrix:
        """A packed weight for products; `which` of several."""
        weight = self._parameters[name]
        assert weight is not None
        known = self.__dict__.setdefault("_matrices", {})
        found = known.get((name, which))
        if found is None or found[0] is not weight:
            packed = weight.detach() if weight.ndim == 2 else weight.detach()[which]
            view = self.forms[name].view(packed, self.widths[name], self.packed_dtype)
            known[name, which] = found = (weight, view)
        matrix: PackedMatrix = found[1]
        return matrix

    def matrices(self, name: str) -> Iterator[PackedMatrix]:
        """All matrices of a packed weight."""
        weight = getattr(self, name)
        for which in range(1 if weight.ndim == 2 else len(weight)):
            yield self.matrix(name, which)

    def __getstate__(self) -> dict[str, Any]:
        """Without views of the weights, which a copy makes of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_matrices"}


class PackedLinear(PackedModule):
    """An `nn.Linear` with packed weights."""

    def __init__(self, like: nn.Linear, form: Form, dtype: torch.dtype, *, ready: bool) -> None:
        super().__init__()
        self.forms, self.widths, self.packed_dtype = {}, {}, dtype
        self.in_features, self.out_features = like.in_features, like.out_features
        self._expect("weight", (like.out_features, like.in_features), form, dtype, ready=ready)
        self.bias = like.bias

    def forward(self, x: Tensor) -> Tensor:
        """As of `nn.Linear`. [..., in_features] to [..., out_features]"""
        matrix = self.matrix("weight")
        rows = x.reshape(-1, self.in_features)
        out = matrix(rows if x.dtype == matrix.dtype else rows.to(matrix.dtype))
        bias = self._parameters.get("bias")
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        """As of `nn.Linear`, and the bits."""
        return f"{self.in_features}, {self.out_features}, bits={self.forms['weight'].bits}"


class PackedEmbedding(PackedModule):
    """An `nn.Embedding` with a row of 8-bit weights for each token."""

    def __init__(self, like: nn.Embedding, form: Form, dtype: torch.dtype, *, ready: bool) -> None:
        super().__init__()
        self.forms, self.widths, self.packed_dtype = {}, {}, dtype
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx = like.padding_idx
        self._expect("weight", (like.num_embeddings, like.embedding_dim), form, dtype, ready=ready)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of tokens. int64 [...] to [..., embedding_dim]"""
        matrix: Any = self.matrix("weight")
        rows: Tensor = matrix.rows_at(ids)
        return rows


class PackedExperts(PackedModule):
    """Mixed into a model's own class of experts: `gate_up_proj` and `down_proj` are packed.

    The rest (activation, gate, biases) stays what the model's class says.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers' experts, one after the other.

        Args:
            hidden_states: [tokens, hidden]
            top_k_index: experts of each token. [tokens, k]
            top_k_weights: [tokens, k]
        """
        own: Any = self
        out = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            if expert >= len(own.down_proj):
                continue  # stands for none
            token, place = torch.where(top_k_index == expert)
            states = self._product("gate_up_proj", expert, hidden_states[token])
            states = self._product("down_proj", expert, own._apply_gate(states))
            states = states * top_k_weights[token, place, None]
            out.index_add_(0, token, states.to(out.dtype))
        return out

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        matrix = self.matrix(name, expert)
        made = matrix(x.to(matrix.dtype)).to(x.dtype)
        bias = getattr(self, f"{name}_bias", None)
        return made if bias is None else made + bias[expert]

    def pack(self, name: str, weight: Tensor, importance: Tensor | None = None) -> Tensor:
        """As of the base class, for experts that are kept turned too."""
        turned = getattr(self, "is_transposed", False)
        return super().pack(name, weight.transpose(1, 2) if turned else weight, importance)


def packed_experts(module: Any, bits: int, dtype: torch.dtype, *, ready: bool) -> bool:
    """Make a model's module of experts a packed one; False where it is of another kind.

    Args:
        module: on "meta".
    """
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    known = hasattr(module, "_apply_gate") and getattr(module, "has_gate", True)
    if not known or getattr(module, "has_post_expert_norm", False):
        return False
    if not all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights):
        return False
    turned = getattr(module, "is_transposed", False)
    sizes = [tuple((each.transpose(1, 2) if turned else each).shape) for each in weights]
    forms = [Form.fitting(bits, *size[1:]) for size in sizes]
    if None in forms:
        return False
    kind = type(module)
    module.__class__ = type(f"Packed{kind.__name__}", (PackedExperts, kind), {})
    module.forms, module.widths, module.packed_dtype = {}, {}, dtype
    for name, size, form in zip(("gate_up_proj", "down_proj"), sizes, forms, strict=True):
        if not ready and turned:
            size = (size[0], size[2], size[1])
        module._expect(name, size, form, dtype, ready=ready)
        module.widths[name] = size[1] if not ready and turned else size[2]
    return True


class QuickNorm(nn.Module):
    """Mixed into a model's own class of norms, where that is Llama's: one call for a few tokens.

    transformers writes it in seven operators, a twentieth of a decode step in 4 bits. What is
    normed is not rounded before it meets the weight.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the model's own. [..., width]"""
        weight: Any = self._parameters["weight"]
        epsilon: Any = self.variance_epsilon
        if (
            torch.is_grad_enabled()
            or hidden_states.numel() > _FEW_NUMBERS
            or hidden_states.dtype != weight.dtype
        ):
            normed: Tensor = super().forward(hidden_states)
            return normed
        return rms_norm(hidden_states, weight, epsilon)


def quicken_norms(model: nn.Module) -> None:
    """Make norms that say what Llama's say `QuickNorm`s, in place."""
    quick: dict[type[nn.Module], type[nn.Module] | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in quick:
            alike = is_norm(module) and says_the_same(module)
            quick[kind] = type(f"Quick{kind.__name__}", (QuickNorm, kind), {}) if alike else None
        if quick[kind] is not None:
            module.__class__ = quick[kind]  # type: ignore[assignment]


def packed_modules(model: nn.Module) -> dict[str, PackedModule]:
    """A model's packed modules by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, PackedModule)}
