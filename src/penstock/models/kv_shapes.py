"""KV shapes by name or from a folder's config.json, without a model's weights."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.shape import KVShape

_TABLE = Path(__file__).parent / "kv_shapes.toml"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def known_kv_shapes() -> Mapping[str, KVShape]:
    """The shapes of `kv_shapes.toml` by name, in the dtype in which each was published."""
    content = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    shapes = {
        name: KVShape(
            num_layers=entry["layers"],
            num_query_heads=entry["query_heads"],
            num_kv_heads=entry["kv_heads"],
            head_dim=entry["head_dim"],
            dtype=_DTYPES[entry["dtype"]],
        )
        for name, entry in content.items()
    }
    return MappingProxyType(shapes)


def kv_shape(name_or_folder: str | Path, dtype: str | None = None) -> KVShape:
    """The KV shape of a model whose beams can be kept in tiers, all of its layers, windowed ones
    too.

    Args:
        name_or_folder: a name of `known_kv_shapes`, or a folder with a config.json.
        dtype: "float16", "bfloat16" or "float32"; None: as published, or as the folder says.

    Raises:
        ConfigError: neither a known name nor a folder with a config.json, or an unknown dtype.
        ModelLoadError: config.json cannot be read, or the model needs code of its own.
        UnsupportedModelError: beams of the model cannot be; says why.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
    known = known_kv_shapes()
    folder = Path(os.path.expanduser(name_or_folder))
    if str(name_or_folder) in known:
        shape = known[str(name_or_folder)]
    elif os.path.isfile(folder / "config.json"):
        shape = _read_shape(folder)
    else:
        raise ConfigError(
            f"{name_or_folder} is no folder with a config.json and no known model; known are "
            f"{', '.join(known)}"
        )
    return shape if dtype is None else replace(shape, dtype=_DTYPES[dtype])


def _read_shape(folder: Path) -> KVShape:
    from penstock.models.beam_cache import block_shape
    from penstock.models.load_errors import said_of
    from penstock.models.model_class import auto_class
    from penstock.models.model_config import read_config
    from penstock.models.model_shape import drop_idle_window

    config = read_config(folder, folder)
    try:
        drop_idle_window(config)
        with torch.device("meta"):  # no weights: only what the classes say
            model: Any = auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"{folder}: {said_of(error)}") from error
    return block_shape(model, 1).kv
