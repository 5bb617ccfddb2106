"""open_model(): what throughput is measured on, a known architecture or a model's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.engine.adapter import LowRankAdapter
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import CausalLM, load
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES, random_adapter, random_model

ADAPTER_FILE = "adapter.safetensors"
"""Name of the low-rank adapter in a model's folder, as in that of the bundled model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """A model in evaluation mode and the low-rank basis that its caches use."""

    model: CausalLM
    adapter: LowRankAdapter
    name: str
    """Of the architecture, or the folder's last part."""
    weights: Literal["random", "stored"]


def open_model(
    config: str, *, max_positions: int, seed: int = 0, device: torch.device | str = "cpu"
) -> BenchModel:
    """Build a known architecture with random weights, or load a model.

    A loaded model has its own adapter where there is one: what `penstock calibrate` made for it,
    `adapter.safetensors` in its folder, or the bundled one. All others have a random basis, which
    costs the same.

    Args:
        config: one of `ARCHITECTURES`, or what `penstock.models.loader.load` takes.
        max_positions: tokens that the model must have positions for.
        seed: of random weights and bases.

    Raises:
        ConfigError: the model has fewer positions.
        ModelLoadError: there is no such model, or it cannot be read.
        UnsupportedModelError: a tiered cache cannot work with it.
        AdapterError: the adapter in the folder is another model's.
    """
    if config in ARCHITECTURES:
        model = random_model(config, max_positions=max_positions, seed=seed, device=device)
        adapter = random_adapter(model, seed)
        return BenchModel(model=model, adapter=adapter, name=config, weights="random")
    try:
        model = load(config, device=device).model
    except ModelLoadError as error:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{error}; known architectures are {known}") from error
    positions = inspect_model(model).max_positions
    if positions < max_positions:
        raise ConfigError(
            f"{config} has {positions} positions, and this run needs {max_positions}; take a "
            "smaller --context (or --prefill-tokens)"
        )
    return BenchModel(
        model=model, adapter=_adapter_of(model, config, seed), name=Path(config).name,
        weights="stored",
    )  # fmt: skip


def _adapter_of(model: CausalLM, config: str, seed: int) -> LowRankAdapter:
    path, mark = Path(config).expanduser() / ADAPTER_FILE, fingerprint(model)
    if not path.is_file():
        return find_adapter(mark) or random_adapter(model, seed)
    adapter, shape = LowRankAdapter.load(path), inspect_model(model).kv
    adapter.check(mark, shape.num_layers, shape.joint_dim)
    return find_adapter(mark, path.parent) or adapter  # the user's own goes first
