"""key_rotations(): how a model turns the keys of its tiered layers, as found by asking it."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.core.errors import PenstockError
from penstock.kernels.key_rotation import KeyRotation
from penstock.models.attention_adapter import Attachment
from penstock.models.cache_argument import CACHE_NAMES
from penstock.models.model_shape import ModelShape, decoder_config
from penstock.models.query_projection import QueryProjection, decoder_layers

_FAULTS = (
    TypeError, AttributeError, ValueError, LookupError, RuntimeError, AssertionError, PenstockError,
)  # fmt: skip
"""What is raised where a model is not built as it looked."""
_PLACES = (0, 1, 5, 130, 1031)
"""Positions at which a layer is asked; those that the model has."""
_NEAR = 0.02
"""Of a query's length: what bfloat16 rounds cosines, sines and products by is a third of it."""
_MOVING = ("dynamic",)
"""Kinds whose frequencies follow the length."""


def key_rotations(model: PreTrainedModel, shape: ModelShape) -> list[KeyRotation | None]:
    """The rotation of each tiered layer's keys, where one of a known form turns its queries.

    Each layer is asked for the queries of one random hidden state at several positions: they must
    be its query at position 0, turned by the frequencies that the model's rotary embedding has.
    That costs a layer's projections. Kinds whose frequencies follow the length, and positions of
    several axes, are not of that form.

    Returns:
        None for layers without a rotation, or whose rotation is not known. Layers that turn alike
        have one object, and all have one or none: others than the most common are None.
    """
    nothing: list[KeyRotation | None] = [None] * len(shape.tiered_layers)
    config = decoder_config(model)
    if _is_unsteady(config):
        return nothing
    places = torch.tensor([place for place in _PLACES if place < shape.max_positions])
    try:
        seen = _Seen(model, decoder_layers(model), places)
        attachment = Attachment(model)
        try:
            with torch.no_grad():
                found = [seen.rotation_of(i, shape.layer_types[i]) for i in shape.tiered_layers]
        finally:
            attachment.detach()
    except _FAULTS as fault:
        if isinstance(fault, torch.OutOfMemoryError):
            raise
        return nothing
    counts = [sum(each is other for other in found) if each else 0 for each in found]
    common = found[counts.index(max(counts))] if found else None
    return [each if each is common else None for each in found]


def _is_unsteady(config: Any) -> bool:
    """Whether angles are not positions times frequencies that stay."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(
        each.get("rope_type", each.get("type")) in _MOVING or "mrope_section" in each
        for each in kinds
    )


class _Seen:
    """Queries of one hidden state at several positions, layer by layer."""

    def __init__(self, model: PreTrainedModel, layers: list[nn.Module], places: Tensor) -> None:
        self._model, self._layers, self._places = model, layers, places
        self._width = int(decoder_config(model).hidden_size)
        self._rotary: Any = _rotary_module(model)
        self._known: list[KeyRotation] = []

    def rotation_of(self, layer: int, kind: str) -> KeyRotation | None:
        """The one that explains a layer's queries."""
        queries = self._queries(layer, kind)
        first = queries[0, :, :1]
        if _is_near(queries[0], first.expand_as(queries[0])):
            return None  # a layer without one: nothing turns
        for rotation in (*self._known, *self._candidates(layer, kind, queries.shape[-1])):
            if _is_near(queries[0], rotation.turned(first, self._places)):
                if all(rotation is not known for known in self._known):
                    self._known.append(rotation)
                return rotation
        return None

    def _embedding(self, positions: Tensor, like: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        takes_kind = "layer_type" in inspect.signature(self._rotary.forward).parameters
        more = {"layer_type": kind} if takes_kind else {}
        cos, sin = self._rotary(like, positions[None], **more)
        return cos, sin

    def _queries(self, layer: int, kind: str) -> Tensor:
        """Float32 in host memory. [1, heads, places, head_dim]"""
        module = self._layers[layer]
        weight = next(module.parameters())
        device = weight.device if weight.device.type != "meta" else self._model.device
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 1, self._width, generator=draw).to(device, self._model.dtype)
        hidden = hidden.expand(1, len(self._places), -1)
        places = self._places.to(device)
        given: dict[str, Any] = {
            "attention_mask": None, "position_ids": places[None], "use_cache": True,
            "cache_position": places,
        }  # fmt: skip
        given["position_embeddings"] = self._embedding(places, hidden, kind)
        taken = _accepted(module, given)
        return QueryProjection(self._layers).probe(layer, hidden, taken).float().cpu()

    def _candidates(self, layer: int, kind: str, head_dim: int) -> Iterator[KeyRotation]:
        """Rotations of the angles that the model's embedding has at position 1."""
        device = next(self._layers[layer].parameters()).device
        if device.type == "meta":
            device = self._model.device
        like = torch.empty(1, 1, 1, dtype=torch.float32, device=device)
        cos, sin = self._embedding(torch.tensor([1], device=device), like, kind)
        angles = torch.atan2(sin[0, 0].double(), cos[0, 0].double()).cpu()
        halves, neighbours = angles[: len(angles) // 2], angles[::2]
        for angle in (halves, neighbours, angles):
            if 0 < 2 * len(angle) <= head_dim:
                for interleaved in (False, True):
                    yield KeyRotation(angle.clone(), interleaved)


def _rotary_module(model: PreTrainedModel) -> Any:
    """The one that all layers share.

    Raises:
        LookupError: there is none, or several.
    """
    found = [
        module for name, module in model.named_modules()
        if name.rpartition(".")[2] == "rotary_emb" and "vis" not in name
    ]  # fmt: skip
    if len(found) != 1:
        raise LookupError("no rotary embedding that all layers share")
    return found[0]


def _accepted(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """What a layer's forward takes of `given`, and no cache under the name that it takes one."""
    parameters = inspect.signature(module.forward).parameters
    cache = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])
    given = {**given, cache: None}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _is_near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= _NEAR * expected.norm())
