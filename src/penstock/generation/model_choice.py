"""chosen_model(): the model and tokenizer that the arguments of `LLM` name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.models.fetch import OnBytes
from penstock.models.loader import (
    WEIGHTS,
    CausalLM,
    LoadedModel,
    Tokenizer,
    check_own_tokenizer,
    load,
)
from penstock.models.packed.quantizer import PackedConfig
from penstock.models.tokenizer_loading import load_tokenizer

_KERNELS = "_marlin"
"""Ends vLLM's names of formats with kernels of its own for them."""


def chosen_model(
    model: str | Path | LoadedModel | CausalLM, tokenizer: Tokenizer | str | Path | None, *,
    dtype: torch.dtype | str | None, device: torch.device | str, quantization: str | None,
    revision: str | None, hf_token: str | bool | None, offline: bool | None,
    trust_remote_code: bool, on_bytes: OnBytes | None,
) -> LoadedModel:  # fmt: skip
    """Load what is not loaded yet.

    Args:
        As for `LLM`; in place of a tokenizer object, a processor that has one.

    Raises:
        ModelLoadError, UnsupportedModelError: as for `load`.
        ConfigError: a tokenizer object was given where the model brings one, a revision of what is
            loaded already, or `quantization` is not that of the model.
    """
    weights = quantization if quantization in WEIGHTS else None
    hub: dict[str, Any] = {
        "token": hf_token, "offline": offline, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    own = None
    if isinstance(tokenizer, str | Path):
        own = load_tokenizer(tokenizer, **hub)
    else:
        check_own_tokenizer(model, tokenizer)
    if isinstance(model, str | Path):
        loaded = load(
            model, dtype=dtype, weights=weights, device=device, revision=revision,
            on_bytes=on_bytes, **hub,
        )  # fmt: skip
    elif revision is not None:
        raise ConfigError(f"revision={revision!r} is for names of models; this one is loaded")
    elif isinstance(model, LoadedModel):
        loaded = model
    else:
        name = model.name_or_path or type(model).__name__
        given = None if isinstance(tokenizer, str | Path) else tokenizer
        inner = getattr(given, "tokenizer", None)  # of a processor
        loaded = LoadedModel(
            model=model, tokenizer=given if inner is None else inner, name=name,
            processor=None if inner is None else given,
        )  # fmt: skip
    _check_quantization(loaded, quantization)
    return loaded if own is None else replace(loaded, tokenizer=own)


def _check_quantization(loaded: LoadedModel, wanted: str | None) -> None:
    if wanted is None:
        return
    said = getattr(loaded.model.config, "quantization_config", None)
    method = said.get("quant_method") if isinstance(said, dict) else getattr(
        said, "quant_method", None
    )  # fmt: skip
    found = None if method is None else str(getattr(method, "value", method))
    if isinstance(said, PackedConfig):
        found = said.origin if wanted == said.origin else f"int{said.bits}"
    if found != wanted.removesuffix(_KERNELS):
        has = "weights that are not quantised" if found is None else f"{found} weights"
        raise ConfigError(
            f"quantization={wanted!r}, but {loaded.name} has {has}; leave it out, or give a model "
            "that was saved so"
        )
