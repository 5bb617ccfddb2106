"""A model that is small and quick."""

from pathlib import Path
from typing import Any

import pytest

from penstock.models.loader import load


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the bundled model's first four layers, where no answer need be right."""
    folder, loaded = tmp_path_factory.mktemp("models") / "shallow", load()
    model: Any = loaded.model
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.config.layer_types = model.config.layer_types[:4]
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder
