"""read_config(): a model folder's config, without what makes transformers fetch code elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from penstock.core.errors import ModelLoadError, UnsupportedModelError
from penstock.core.regular_file import JSON_BYTES_MAX, read_regular
from penstock.models.load_errors import said_of

_CHOSEN = ("_attn_implementation", "_experts_implementation")
"""What computes a layer: the name of a kernel in a hub, or one that stands for it."""
_MADE_PLAIN = ("mxfp4", "fp8")
"""Formats of weights whose kernels come from a hub, and that can be read as plain weights."""
_KERNEL_ALONE = ("eetq", "fbgemm_fp8", "metal", "nvfp4")
"""Those that cannot."""


def read_config(folder: Path, name: str | Path, *, own_code: bool = False) -> PretrainedConfig:
    """The config of a model folder; it names no kernels.

    Which function computes attention or experts is transformers' choice and then ours, never the
    folder's. Weights in a format whose kernels come from a hub are read as plain weights.

    Args:
        name: what the user called the model, for messages.
        own_code: whether Python code in the folder may run; without it, none does.

    Raises:
        ModelLoadError: config.json cannot be read, or the model needs code of its own.
        UnsupportedModelError: its weights cannot be read without code from a hub.
    """
    try:
        read_regular(folder / "config.json", JSON_BYTES_MAX)  # the library would wait for a pipe
        config: Any = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=own_code
        )
    except OSError as error:
        said = said_of(error) if error.errno is None else error.strerror
        raise ModelLoadError(f"{name}: config.json cannot be read: {said}") from error
    except Exception as error:
        raise ModelLoadError(f"{name}: {said_of(error)}") from error
    if not isinstance(config, PretrainedConfig):
        raise ModelLoadError(f"{name}: config.json describes no model")
    for each in _with_inner(config, set()):
        for choice in _CHOSEN:
            if f"{choice}_internal" in vars(each):
                setattr(each, f"{choice}_internal", None)
            elif choice in vars(each):
                setattr(each, choice, None)
        _require_plain(each, name)
    return config


def _with_inner(config: PretrainedConfig, seen: set[int]) -> Iterator[PretrainedConfig]:
    """A config and all that are in it, such as a text model's in one for images."""
    if id(config) in seen:
        return
    seen.add(id(config))
    yield config
    for value in list(vars(config).values()):
        inner = value.values() if isinstance(value, dict) else value
        for each in inner if isinstance(value, dict | list | tuple) else [value]:
            if isinstance(each, PretrainedConfig):
                yield from _with_inner(each, seen)


def _require_plain(config: PretrainedConfig, name: str | Path) -> None:
    quantized = getattr(config, "quantization_config", None)
    if not isinstance(quantized, dict):
        return
    method = quantized.get("quant_method")
    if method in _MADE_PLAIN:
        quantized["dequantize"] = True
    elif method in _KERNEL_ALONE:
        raise UnsupportedModelError(
            f"{name}: weights in the format {method} need kernels that transformers fetches from "
            "a hub, and Penstock runs no code from there; take plain weights"
        )
