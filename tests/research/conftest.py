"""Models that are small and quick."""

from pathlib import Path
from typing import Any

import pytest

from penstock.models.loader import load


def _cut(folder: Path, layers: int) -> Path:
    """The folder of the bundled model's first layers."""
    loaded = load()
    model: Any = loaded.model
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the bundled model's first two layers, where no answer need be right."""
    return _cut(tmp_path_factory.mktemp("models") / "shallow", 2)


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the bundled model's first four layers, where memory of layers is compared."""
    return _cut(tmp_path_factory.mktemp("models") / "four", 4)
