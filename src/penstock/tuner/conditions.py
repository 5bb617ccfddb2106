"""What must be the same for a tuning's measurements to hold: the head of its journal."""

import hashlib
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core.cpu_name import cpu_name
from penstock.core.regular_file import JSON_BYTES_MAX, read_regular
from penstock.kernels.native.compiled import kernel
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel
from penstock.storage.open_files import find_directory
from penstock.storage.store import parse_location
from penstock.tuner.lookup_tables import LookupTables

_KERNELS = ("select_groups", "low_rank")
"""Compiled ones that stand for all: those of any processor, and those that want wide vectors."""


def circumstances(
    loaded: LoadedModel, pieces: Sequence[Tensor], *, adapter: str | Path | None,
    tables: LookupTables | str | Path | None, disk: str, **asked: Any,
) -> dict[str, Any]:  # fmt: skip
    """The model, the machine, the texts and what else was given, as plain data.

    Args:
        pieces: token ids of the texts.
        adapter, tables: as given to `tune`; without an adapter the one that is found beside the
            model counts. What is made from the texts is told apart by version and texts.
        disk: as given to `tune`; the folder that it leads to now counts too.
        asked: sizes and limits.

    Raises:
        ConfigError: the disk makes no sense.
        StorageError: its folder cannot be made.
    """
    weight = loaded.model.get_input_embeddings().weight
    _, place = parse_location(disk)
    folder = None if place == "memory" else os.path.realpath(find_directory(place))
    return {
        **asked, "disk": disk, "folder": folder, "fingerprint": fingerprint(loaded.model),
        "dtype": str(loaded.model.dtype), "machine": _machine(weight.device),
        "texts": [_digest(piece.to(torch.int64).numpy().tobytes()) for piece in pieces],
        "adapter": _digest_found(loaded) if adapter is None else _digest_of(adapter),
        "tables": _digest_of(tables),
        "versions": {name: version(name) for name in ("penstock", "torch", "transformers")},
    }  # fmt: skip


def _machine(device: torch.device) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(), "cores": cores, "threads": torch.get_num_threads(),
        "compiled": [name for name in _KERNELS if kernel(name) is not None],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }  # fmt: skip


def _digest_found(loaded: LoadedModel) -> str | None:
    """Of the adapter that a tuning takes where none was given; None: it makes one."""
    found = find_adapter(fingerprint(loaded.model), loaded.model.name_or_path)
    if found is None:
        return None
    digest = hashlib.sha256(repr((found.prediction_cosine, found.selection_cost)).encode())
    for layer in found.layers:
        digest.update(repr(layer.basis.shape).encode())
        digest.update(layer.basis.cpu().numpy().tobytes() + layer.peak.cpu().numpy().tobytes())
        if layer.scale is not None:
            digest.update(layer.scale.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _digest_of(given: LookupTables | str | Path | None) -> str | None:
    if isinstance(given, LookupTables):
        return _digest(repr(given).encode())
    try:
        return None if given is None else _digest(read_regular(given, JSON_BYTES_MAX))
    except OSError:
        return "unreadable"  # which is said where it is loaded


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
