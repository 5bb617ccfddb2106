"""PrefetchHooks: start a layer's fetch while the layer before it computes."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.engine.joined_runtime import JoinedRuntime
from penstock.engine.policy import SelectionPolicy
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.models.attention_adapter import without_autocast, without_gradients
from penstock.models.cache_argument import cache_name_in
from penstock.models.model_shape import NOTHING, RECURRENT, ModelShape
from penstock.models.query_projection import (
    QueryProjection,
    copied_bytes,
    decoder_layers,
)
from penstock.models.shared_part import SharedPart, Undo

_UNSEEN = object()


def can_predict(shape: ModelShape, layer: int) -> bool:
    """Whether a layer's query can be predicted from the input of the layer before."""
    if not 0 < layer < len(shape.layer_types):
        return False
    before = shape.layer_types[layer - 1]
    return before == shape.layer_types[layer] or before in (NOTHING, *RECURRENT)


def predictor_bytes(
    model: PreTrainedModel, shape: ModelShape, policy: SelectionPolicy, but: frozenset[int]
) -> int:
    """What copies of the predicting weights would take.

    Args:
        but: tiered layers that are not predicted.
    """
    if not policy.predicts or shape.kv.values_in_keys:
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
    """The decoder layers; None where they cannot be found, so that nothing is predicted."""
    try:
        return decoder_layers(model)
    except UnsupportedModelError:
        return None


class PrefetchHooks:
    """Starts fetches before decoder layers: forward pre-hooks are all that is put on a layer.

    The hook of layer i-1 predicts layer i's query from layer i-1's input (KVSwap 3.3) and begins
    the fetch. A layer whose predecessor is of another kind (sliding window, with a rotary embedding
    of its own) is not predicted, like layer 0 and those whose prediction is not trusted: its own
    hook projects its true query a little ahead of the layer, so that its reads are on their way
    before those of the layer behind it are. On the device tier predictions alone are made, on a
    stream beside the step's.

    A recurrent predecessor predicts like any other, where the model calls it with the rotary
    embedding of the layer behind it. Where it does not, or where both are one layer (Falcon-H1),
    the true query is used.

    A model has one hook a layer, for all of its caches: it asks the cache of the call.
    """

    def __init__(
        self, model: PreTrainedModel, shape: ModelShape, runtime: TieredRuntime | JoinedRuntime
    ) -> None:
        self._begun: dict[int, list[tuple[int, int, bool]]] = {}
        """By layer, what its hook begins: the layer whose query it is, its tier, and whether it is
        the hook's own."""
        self._part: SharedPart | None = None
        self._at, self._length, self._runtime = -1, -1, weakref.ref(runtime)
        self._unsure: dict[int, Any] = {}
        """Layers behind a recurrent one, and the rotary embedding that their query was predicted
        with; until their own call has shown that it is theirs."""
        if not runtime.policy.predicts or runtime.settings.exact:
            return
        layers = _known_layers(model)
        if layers is None:
            return
        self._projection = QueryProjection(layers)
        for tier, layer in enumerate(shape.tiered_layers):
            if can_predict(shape, layer) and tier not in runtime.settings.true_query_layers:
                self._begun.setdefault(layer - 1, []).append((layer, tier, False))
                if shape.layer_types[layer - 1] != shape.layer_types[layer]:
                    self._unsure[layer] = _UNSEEN
                    self._begun.setdefault(layer, [])
            elif can_predict(shape, layer + 1):
                self._begun.setdefault(layer, []).append((layer, tier, True))
        if self._begun:
            self._part = SharedPart(model, "layers", partial(_put_hooks, layers))

    def before_layer(self, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Begin what can begin before a decoder layer.

        Args:
            hidden: the layer's input. [batch, 1, hidden_size]
            kwargs: what it was called with.
        """
        runtime = self._runtime()
        if runtime is None or layer not in self._begun:
            return
        if layer <= self._at:  # another step
            if runtime.length == self._length:
                runtime.drop_fetches()  # the former one was given up
            self._length = runtime.length
        self._at = layer
        self._compare_rotary(layer, kwargs)
        for query_layer, tier, is_own in self._begun[layer]:
            if runtime.wants_query(tier):
                self._begin(runtime, query_layer, tier, hidden, kwargs, is_own=is_own)

    def _compare_rotary(self, layer: int, kwargs: dict[str, Any]) -> None:
        """Predict a layer behind a recurrent one no more if it is called with another rotary
        embedding than that one is."""
        if self._unsure.get(layer, _UNSEEN) is _UNSEEN:
            return
        seen, own = self._unsure.pop(layer), kwargs.get("position_embeddings")
        if not _is_same(seen, own):
            ahead = self._begun[layer - 1]
            self._begun[layer - 1] = [each for each in ahead if each[0] != layer]

    def _begin(
        self, runtime: TieredRuntime | JoinedRuntime, layer: int, tier: int, hidden: Tensor,
        kwargs: dict[str, Any], *, is_own: bool,
    ) -> None:  # fmt: skip
        if runtime.on_device_tier and is_own:
            return
        if not is_own and layer in self._unsure:
            self._unsure[layer] = kwargs.get("position_embeddings")
        self._projection.may_copy = runtime.plan.predictor_bytes > 0
        with without_gradients(), runtime.choosing(tier, hidden):
            if is_own:
                query = self._projection.project_exactly(layer, hidden, kwargs)
            else:
                query = self._projection.project(layer, hidden, kwargs)
            if query is not None:
                with without_autocast(query.device):
                    runtime.begin_fetch(tier, query.to(runtime.settings.shape.dtype))

    def remove(self) -> None:
        """Leave the model's layers to its other caches; the last one takes the hooks off."""
        if self._part is not None:
            self._part.leave()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two rotary embeddings, cosines and sines, are the same; or both are none."""
    if one is other or not (isinstance(one, tuple) and isinstance(other, tuple)):
        return one is other
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=False))


def _put_hooks(layers: list[nn.Module]) -> Undo:
    handles = [
        layer.register_forward_pre_hook(partial(_before_layer, number), with_kwargs=True)
        for number, layer in enumerate(layers)
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _before_layer(
    layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> None:
    """Ask the cache that this call brings.

    Args:
        kwargs: None in a call that runs while the hook is put on or taken off in another thread,
            and torch does not know that it wants them: that call is not one of ours.
    """
    if kwargs is None:
        return
    begin = getattr(kwargs.get(cache_name_in(kwargs)), "before_layer", None)
    hidden = args[0] if args else kwargs.get("hidden_states")
    if begin is not None and hidden is not None and hidden.shape[1] == 1:
        begin(layer, hidden, kwargs)
