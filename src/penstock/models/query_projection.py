"""QueryProjection: the query that a layer would make of some hidden state."""

import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.kernels.int8_linear import Int8Linear
from penstock.kernels.predicted_query import PredictedQuery
from penstock.kernels.query_steps import rms_norm, turn_query
from penstock.models.attention_adapter import ProbeDone, mark_probe
from penstock.models.cache_argument import cache_name_in
from penstock.models.latents import Latents, caches_latents, handed_out
from penstock.models.weight_access import is_plain

_MISFITS = (
    TypeError, AttributeError, ValueError, LookupError, RuntimeError, AssertionError,
)  # fmt: skip
"""What is raised where a layer is not built as it looked, or needs more than it was given."""


class _ProbeCache:
    """Stands in for the cache while a layer is asked for its query."""

    def __init__(self, *, latent: bool) -> None:
        self._latent = latent

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._latent:
            mark_probe(key_states)
            return key_states, value_states
        keys = torch.cat((key_states, value_states), dim=-1)
        mark_probe(keys)
        return handed_out(key_states, Latents(keys, key_states)), value_states

    def get_seq_length(self, *_: Any) -> int:
        return 0


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model, in order.

    Raises:
        UnsupportedModelError: they cannot be found.
    """
    return list(_find_layers(model)[1])


def decoder_name(model: PreTrainedModel) -> str:
    """Name of the module that has the decoder layers, within a model.

    Raises:
        UnsupportedModelError: it cannot be found.
    """
    return _find_layers(model)[0].rpartition(".")[0]


def _find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    for name, module in model.named_modules():
        alike = isinstance(module, nn.ModuleList) and len(module) == count and "vis" not in name
        if alike and all(_may_be_layer(each, place) for place, each in enumerate(module)):
            return name, module
    raise UnsupportedModelError(f"found no list of {count} layers in {type(model).__name__}")


def _may_be_layer(module: nn.Module, place: int) -> bool:
    """Whether those of a module's parts that say which layer they belong to say this one."""
    said = {getattr(part, "layer_idx", place) for part in module.modules()}
    return said <= {place, None}


class QueryProjection:
    """Projects a hidden state to a layer's post-RoPE query, by the layer's own code.

    KVSwap section 3.3: while layer i-1 computes, its input stands in for layer i's, and layer i's
    own projection makes the query. Two ways, the same result:

    * the probe runs the layer's forward until attention is called, which covers any architecture
      but computes keys and values too;
    * the direct way (norm, q_proj, q_norm, rotary, each in one call) costs a third; it is taken for
      a layer only after it has reproduced the probe's query on that layer's first call, to the
      rounding of the model's dtype.

    A layer whose forward cannot be run ahead of its turn has no prediction: its true query chooses.

    Where the budget allows it, the direct way reads its own copy of q_proj in 8 bits: a prediction
    is no better for being made with 16, and reading the weights is most of what it costs.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._ways: dict[int, Literal["direct", "probe", "none"]] = {}
        self._copies: dict[int, PredictedQuery | None] = {}
        self._latent: dict[int, bool] = {}
        self.may_copy = False
        """Whether the budget has room for the copies, see `copied_bytes`."""

    def project(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The query of `layer` for `hidden`.

        Args:
            hidden: input of a decoder layer. [batch, 1, hidden_size]
            kwargs: what the decoder layer was called with.

        Returns:
            [batch, num_heads, head_dim]; None where only the layer's turn shows it.
        """
        if layer not in self._ways:
            return self._try_ways(layer, hidden, kwargs)
        if self._ways[layer] == "direct":
            predicted = self._predicted_query(layer)
            if predicted is not None:
                return predicted(hidden, *kwargs["position_embeddings"])
            return _project_directly(self._layers[layer], hidden, kwargs)
        if self._ways[layer] == "none":
            return None
        return self.probe(layer, hidden, kwargs)[:, :, -1]

    def project_exactly(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """As `project`, with the layer's own weights; None where only the probe shows it."""
        if layer not in self._ways:
            return self._try_ways(layer, hidden, kwargs)
        direct = self._ways[layer] == "direct"
        return _project_directly(self._layers[layer], hidden, kwargs) if direct else None

    def _try_ways(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The query by the probe, if it can be run; the direct way must say the same."""
        try:
            probed = self.probe(layer, hidden, kwargs)[:, :, -1]
        except _MISFITS as misfit:
            if isinstance(misfit, torch.OutOfMemoryError):
                raise
            self._ways[layer] = "none"
            return None
        try:
            direct = _project_directly(self._layers[layer], hidden, kwargs)
        except _MISFITS as misfit:  # a part that merely has Llama's name, of another width
            if isinstance(misfit, torch.OutOfMemoryError):
                raise
            direct = None
        fits = direct is not None and _agree(direct, probed)
        self._ways[layer] = "direct" if fits else "probe"
        return direct if fits else probed

    def _predicted_query(self, layer: int) -> PredictedQuery | None:
        """The layer's copy, made when it is first used; copies go when their room goes."""
        if not self.may_copy:
            self._copies.clear()
        elif layer not in self._copies:
            self._copies[layer] = _copied_steps(self._layers[layer])
        return self._copies.get(layer)

    def probe(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The queries of all tokens by the layer's own forward. [batch, heads, tokens, head_dim]"""
        module = self._layers[layer]
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        if layer not in self._latent:
            self._latent[layer] = caches_latents(module)
        others[cache_name_in(kwargs)] = _ProbeCache(latent=self._latent[layer])
        try:
            module.forward(hidden, **others)
        except ProbeDone as done:
            return done.query
        raise UnsupportedModelError(f"{type(module).__name__} never called its attention function")


def copied_bytes(layers: list[nn.Module]) -> int:
    """What 8-bit copies of these layers' q_proj take; 0 where they would not be faster."""
    linears = filter(None, map(_copied, layers))
    return sum(Int8Linear.num_bytes(linear.weight, linear.bias) for linear in linears)


def _copied(layer: nn.Module) -> nn.Linear | None:
    """The layer's q_proj, if a copy of it would be faster: norms as Llama's, a kernel for them."""
    attention = getattr(layer, "self_attn", None)
    norms = [getattr(layer, "input_layernorm", None), getattr(attention, "q_norm", None)]
    if norms[0] is None or not hasattr(attention, "head_dim"):
        return None
    linear = getattr(attention, "q_proj", None)
    # A subclass may do more than its weights say.
    if type(linear) is not nn.Linear or not is_plain(linear, "weight", "bias"):
        return None
    if not Int8Linear.is_fast(linear.weight):
        return None
    if any(norm is not None and not _is_rms_norm(norm) for norm in norms):
        return None
    return linear


def _copied_steps(layer: nn.Module) -> PredictedQuery | None:
    """The steps of `_project_directly` with a copy of q_proj."""
    linear = _copied(layer)
    if linear is None:
        return None
    attention: Any = layer.self_attn
    norm: Any = layer.input_layernorm
    q_norm: Any = getattr(attention, "q_norm", None)
    weight, epsilon = (None, 0.0) if q_norm is None else (q_norm.weight, q_norm.variance_epsilon)
    return PredictedQuery(
        norm.weight, norm.variance_epsilon, Int8Linear(linear.weight, linear.bias),
        attention.head_dim, weight, epsilon,
    )  # fmt: skip


def _project_directly(module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Norm, q_proj, q_norm and rotary embedding, for layers built like Llama's; else None."""
    attention: Any = getattr(module, "self_attn", None)
    norm: Any = getattr(module, "input_layernorm", None)
    rotary = kwargs.get("position_embeddings")
    if attention is None or norm is None or not hasattr(attention, "q_proj"):
        return None
    if not isinstance(rotary, tuple) or rotary[0].shape[-1] != getattr(attention, "head_dim", 0):
        return None
    if not hasattr(sys.modules[type(attention).__module__], "rotate_half"):
        return None
    cos, sin = rotary
    query: Tensor = attention.q_proj(_normalised(norm, hidden))
    query = query.view(query.shape[0], -1, cos.shape[-1])
    weight, epsilon = None, 0.0
    if hasattr(attention, "q_norm"):
        q_norm = attention.q_norm
        if not _is_rms_norm(q_norm) or q_norm.weight.dtype != query.dtype:
            query = q_norm(query)
        else:
            weight, epsilon = q_norm.weight, q_norm.variance_epsilon
    return turn_query(query, cos[:, -1], sin[:, -1], weight, epsilon)


def _normalised(norm: Any, hidden: Tensor) -> Tensor:
    """`norm(hidden)`; in one call where the module is an RMSNorm as Llama has it."""
    if not _is_rms_norm(norm) or norm.weight.dtype != hidden.dtype:
        out: Tensor = norm(hidden)
        return out
    return rms_norm(hidden, norm.weight, norm.variance_epsilon)


def _is_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm has Llama's parts, and they may be read instead of calling it."""
    return hasattr(norm, "variance_epsilon") and is_plain(norm)


def _agree(direct: Tensor, probed: Tensor) -> bool:
    """Whether two ways to a query differ by rounding only."""
    if direct.shape != probed.shape or direct.dtype != probed.dtype:
        return False
    step = 4 * torch.finfo(probed.dtype).eps
    return torch.allclose(direct, probed, rtol=step, atol=step * float(probed.abs().max()))
