"""PrefetchHooks: start a layer's fetch while the layer before it computes."""

import weakref
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.models.attention_adapter import without_autocast, without_gradients
from penstock.models.cache_argument import cache_name_in
from penstock.models.model_shape import ModelShape
from penstock.models.query_projection import (
    QueryProjection,
    copied_bytes,
    decoder_layers,
)
from penstock.policies.base import SelectionPolicy
from penstock.runtime.tiered_runtime import TieredRuntime

if TYPE_CHECKING:
    from penstock.models.cache_adapter import TieredCache


def can_predict(shape: ModelShape, layer: int) -> bool:
    """Whether a layer's query can be predicted from the input of the layer before."""
    if not 0 < layer < len(shape.layer_types):
        return False
    return shape.layer_types[layer - 1] == shape.layer_types[layer]


def predictor_bytes(
    model: PreTrainedModel, shape: ModelShape, policy: SelectionPolicy, but: frozenset[int]
) -> int:
    """What copies of the predicting weights would take.

    Args:
        but: tiered layers that are not predicted.
    """
    if not policy.predicts:
        return 0
    layers = _known_layers(model)
    if layers is None:
        return 0
    predicted = [
        layers[layer] for tier, layer in enumerate(shape.tiered_layers)
        if tier >= policy.whole_layers and tier not in but and can_predict(shape, layer)
    ]  # fmt: skip
    return copied_bytes(predicted)


def _known_layers(model: PreTrainedModel) -> list[nn.Module] | None:
    """The decoder layers; None where they cannot be told, so that nothing is predicted."""
    try:
        return decoder_layers(model)
    except UnsupportedModelError:
        return None


class PrefetchHooks:
    """Forward pre-hooks on decoder layers: the only thing that is put on a model.

    The hook of layer i-1 predicts layer i's query from layer i-1's input (KVSwap 3.3) and begins
    the fetch. A layer whose predecessor is of another kind (sliding window, with a rotary embedding
    of its own) is not predicted, like layer 0 and those whose prediction is not trusted: its own
    hook projects its true query a little ahead of the layer, so that its reads are on their way
    before those of the layer behind it are. On the device tier predictions alone are made, on a
    stream beside the step's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        cache: "weakref.ref[TieredCache]",
        runtime: TieredRuntime,
    ) -> None:
        self._handles: list[RemovableHandle] = []
        if not runtime.policy.predicts or runtime.config.exact:
            return
        self._cache = cache
        self._runtime = weakref.ref(runtime)
        layers = _known_layers(model)
        if layers is None:
            return
        self._projection = QueryProjection(layers)
        for tier, layer in enumerate(shape.tiered_layers):
            if can_predict(shape, layer) and tier not in runtime.config.true_query_layers:
                self._hook(layers[layer - 1], layer, tier, is_own=False)
            elif can_predict(shape, layer + 1):
                self._hook(layers[layer], layer, tier, is_own=True)

    def _hook(self, module: nn.Module, layer: int, tier: int, *, is_own: bool) -> None:
        hook = partial(self._before_layer, layer, tier, is_own)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _before_layer(
        self,
        layer: int,
        tier: int,
        is_own: bool,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        runtime = self._runtime()
        hidden = args[0] if args else kwargs.get("hidden_states")
        if runtime is None or hidden is None or hidden.shape[1] != 1:
            return
        cache = kwargs.get(cache_name_in(kwargs))
        if cache is not self._cache() or not runtime.wants_query(tier):
            return
        steps = runtime.device_steps
        if steps is not None and is_own:
            return
        self._projection.may_copy = runtime.plan.predictor_bytes > 0
        beside = (
            nullcontext() if steps is None else steps.beside(runtime.layer_length(tier), hidden)
        )
        with without_gradients(), beside:
            if is_own:
                query = self._projection.project_exactly(layer, hidden, kwargs)
            else:
                query = self._projection.project(layer, hidden, kwargs)
            if query is not None:
                with without_autocast(query.device):
                    runtime.begin_fetch(tier, query.to(runtime.config.shape.dtype))

    def remove(self) -> None:
        """Take every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
