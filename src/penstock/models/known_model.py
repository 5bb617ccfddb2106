"""KnownModel: what caches ask of a model, kept from one cache to the next."""

import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.kernels.key_rotation import KeyRotation
from penstock.models.fingerprint import fingerprint
from penstock.models.first_look import first_look
from penstock.models.key_rotations import key_rotations
from penstock.models.model_shape import ModelShape
from penstock.models.weight_access import model_device

_Found = TypeVar("_Found")


class KnownModel:
    """Keeps answers about one model, as long as it has the same modules, weights, buffers and
    configuration; weights that code has written to through `.data` look the same. Any thread may
    ask."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: tuple[_Looks, dict[Hashable, Any]] | None = None

    def __deepcopy__(self, memo: object) -> "KnownModel":
        return KnownModel()

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownModel, ()

    def look(self, model: PreTrainedModel) -> "ModelAnswers":
        """What is known of the model as it is now."""
        looks, known = _Looks(model), self._known
        if known is None or not known[0].same_as(looks):
            self._known = known = looks, {}
        return ModelAnswers(model, known[1])


class ModelAnswers:
    """What caches ask of a model, each asked once."""

    def __init__(self, model: PreTrainedModel, found: dict[Hashable, Any] | None = None) -> None:
        """Begin with what was found before."""
        self._model, self._found = model, {} if found is None else found

    def fingerprint(self) -> str:
        """As `fingerprint`."""
        return self._recall("fingerprint", lambda: fingerprint(self._model))

    def rotations(self, shape: ModelShape) -> list[KeyRotation | None]:
        """As `key_rotations`; objects of the caller's own: the tables that they make are large."""
        found = self._recall("rotations", lambda: key_rotations(self._model, shape))
        own = {id(each): replace(each) for each in found if each is not None}
        return [None if each is None else own[id(each)] for each in found]

    def adapter(self, path: str | Path) -> LowRankAdapter:
        """As `LowRankAdapter.load`, of a file that has not changed since."""
        try:
            seen = os.stat(path)
        except OSError:
            return LowRankAdapter.load(path)  # which says what is wrong
        key = (
            str(path),
            seen.st_dev,
            seen.st_ino,
            seen.st_size,
            seen.st_mtime_ns,
            seen.st_ctime_ns,
        )
        return self._recall(key, lambda: LowRankAdapter.load(path))

    def first_look(self, shape: ModelShape) -> tuple[KVShape, torch.device]:
        """As `first_look`, under the autocast that is on now."""
        kind = model_device(self._model).type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = ("first look", autocast, self._model.training)
        return self._recall(key, lambda: first_look(self._model, shape))

    def _recall(self, key: Hashable, make: Callable[[], _Found]) -> _Found:
        if key not in self._found:
            self._found[key] = make()
        return cast(_Found, self._found[key])


class _Looks:
    """What is seen of a model without reading its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config.to_json_string(use_diff=False)
        self._parts: list[weakref.ref[nn.Module | Tensor]] = []
        self._marks: list[tuple[int, int] | None] = []
        self.is_sure = True
        for module in model.modules():
            self._parts.append(weakref.ref(module))
            self._marks.append(None)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._parts.append(weakref.ref(tensor))
                    self._marks.append(self._mark(tensor))

    def _mark(self, tensor: Tensor) -> tuple[int, int] | None:
        try:
            return tensor._version, tensor.data_ptr()
        except RuntimeError:  # inference tensors count no changes, wrapped ones have no place
            self.is_sure = False
            return None

    def same_as(self, other: "_Looks") -> bool:
        """Whether nothing has changed between two looks."""
        return (
            self.is_sure and other.is_sure and self._config == other._config
            and self._marks == other._marks
            # Of a part that is gone, another may have the same id by now.
            and all(
                (one := mine()) is not None and one is its()
                for mine, its in zip(self._parts, other._parts, strict=True)
            )
        )  # fmt: skip
