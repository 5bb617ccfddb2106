"""kept_model(): a model with packed weights, made once and mapped from a file from then on.

The file lies in the user's cache, in a folder for the model, its bits and this machine's packing.
"""

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.byte_size import format_bytes
from penstock.core.regular_file import JSON_BYTES_MAX, open_regular, read_regular
from penstock.kernels.packed_weights import packing
from penstock.models.fetch import OnBytes
from penstock.models.packed.quantizer import PackedConfig
from penstock.models.packed.sources import FORMAT, PackedSource, loaded

_ABOUT = "penstock-weights.json"
"""In a kept folder: what it was made of, and its checksum. Written last."""
_FILE = "model.safetensors"
_BESIDE = ("config.json", "generation_config.json")
_WORK = "packing-"
_PIECE = 1 << 22
_UNFIT = re.compile(r"[^\w.-]+")


def weights_cache() -> Path:
    """The user's folder of packed weights."""
    return Path.home() / ".cache" / "penstock" / "weights"


def kept_model(source: PackedSource, cache: Path | None = None) -> tuple[PreTrainedModel, str]:
    """A model with packed weights, from the cache; put there if it is not yet.

    Args:
        cache: None: `weights_cache()`.

    Returns:
        The model, its packed weights mapped, and what to report: place and size of what was
        written, or why it could not be; empty if it was there already.

    Raises:
        ModelLoadError: the weights cannot be read.
    """
    if source.own_code:  # its code lies in its own folder
        return source.make(), ""
    cache = weights_cache() if cache is None else cache
    name = _UNFIT.sub("-", source.name) or "model"
    place = cache / f"{name}-int{source.bits}-{source.key}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            if _is_whole(place, source.on_bytes):
                return _opened(place, source), ""
            shutil.rmtree(place, ignore_errors=True)
            for left in cache.glob(f"{_WORK}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            model = source.make()
            try:
                _write(model, place, source)
            except OSError as error:
                reason = error.strerror or error
                return model, f"packed weights could not be kept in {cache}: {reason}"
            del model
    except OSError as error:
        if error.errno is None:
            raise
        reason = error.strerror or error
        return source.make(), f"packed weights could not be kept in {cache}: {reason}"
    size = format_bytes((place / _FILE).stat().st_size)
    said = f"weights packed to int{source.bits}, which takes {size} in {place}"
    return _opened(place, source), f"{said}; it can be removed at any time"


def _opened(place: Path, source: PackedSource) -> PreTrainedModel:
    about = _about(place)
    config = copy.deepcopy(source.config)
    config.quantization_config = about["packed"]
    model = loaded(place, config, getattr(torch, about["dtype"]), None)
    model.name_or_path = model.config._name_or_path = str(source.folder)
    return model


def _write(model: PreTrainedModel, place: Path, source: PackedSource) -> None:
    """Put a model's state into a folder that appears whole or not at all."""
    state = _state_of(model)
    size = sum(weight.nbytes for weight in state.values())
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=_WORK) as work:
        beside = Path(work) / "model"
        beside.mkdir()
        source.on_bytes(f"writing {place}", 0, size)
        save_file(state, beside / _FILE, metadata={"format": "pt"})
        for name in _BESIDE:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, beside / name)
        packed: PackedConfig = model.config.quantization_config
        about = {
            "format": FORMAT, "source": str(source.folder), "packing": packing(),
            "packed": packed.to_dict(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "checksum": _checksum(beside / _FILE, lambda done: None),
        }  # fmt: skip
        (beside / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        beside.rename(place)
        source.on_bytes(f"writing {place}", size, size)


def _state_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's state by name, each tensor once."""
    state: dict[str, Tensor] = {}
    seen = set()
    for name, weight in model.state_dict().items():
        place = (weight.data_ptr(), weight.nbytes)
        if place not in seen:
            seen.add(place)
            state[name] = weight.contiguous()
    return state


def _is_whole(place: Path, on_bytes: OnBytes) -> bool:
    """Whether a kept folder is there and undamaged. Its bytes are read, as the first token would
    read them."""
    if not place.is_dir():
        return False
    try:
        size = os.stat(place / _FILE).st_size
        found = _checksum(
            place / _FILE, lambda done: on_bytes(f"checking {place.name}", done, size)
        )
        return bool(found == _about(place)["checksum"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _about(place: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(read_regular(place / _ABOUT, JSON_BYTES_MAX))
    return about


def _checksum(path: Path, on_done: Callable[[int], None]) -> str:
    digest, done = xxhash.xxh3_128(), 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            on_done(done)
    return digest.hexdigest()
