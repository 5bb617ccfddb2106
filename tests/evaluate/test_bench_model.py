"""What throughput is measured on: architectures by name, and folders with or without an adapter."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import penstock.models
from penstock.core.errors import AdapterError, ConfigError, ModelLoadError
from penstock.engine.adapter import LayerAdapter, LowRankAdapter
from penstock.evaluate.bench_model import ADAPTER_FILE, open_model
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.plain_model import random_adapter, random_model

RECALL = Path(penstock.models.__file__).parent / "recall"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model("tiny", max_positions=4096, seed=7).save_pretrained(tmp_path / "mine")
    AutoTokenizer.from_pretrained(RECALL).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def save(adapter: LowRankAdapter, folder: Path) -> None:
    """A random adapter has one basis for all layers; a file wants its own for each."""
    layers = [LayerAdapter(layer.basis.clone(), layer.peak.clone()) for layer in adapter.layers]
    LowRankAdapter(layers, adapter.fingerprint, 0).save(folder / ADAPTER_FILE)


def test_an_architecture_has_random_weights() -> None:
    opened = open_model("tiny", max_positions=5000, seed=3)
    assert (opened.name, opened.weights) == ("tiny", "random")
    same = random_model("tiny", max_positions=5000, seed=3)
    assert opened.adapter.fingerprint == fingerprint(same)


def test_a_folder_has_its_weights_and_a_random_basis(folder: Path) -> None:
    opened = open_model(str(folder), max_positions=4096, seed=3)
    assert (opened.name, opened.weights) == ("mine", "stored")
    stored = random_model("tiny", max_positions=4096, seed=7)
    for (name, mine), theirs in zip(
        opened.model.named_parameters(), stored.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert torch.equal(opened.adapter.layers[0].basis, random_adapter(stored, 3).layers[0].basis)


def test_an_adapter_that_lies_there_is_used(folder: Path) -> None:
    model = open_model(str(folder), max_positions=64).model
    save(random_adapter(model, seed=11), folder)
    opened = open_model(str(folder), max_positions=64, seed=3)
    assert torch.equal(opened.adapter.layers[0].basis, random_adapter(model, 11).layers[0].basis)
    save(random_adapter(random_model("tiny", max_positions=64, seed=8)), folder)
    with pytest.raises(AdapterError, match="another model"):
        open_model(str(folder), max_positions=64)


def test_the_bundled_model_has_the_bundled_adapter() -> None:
    opened = open_model("recall", max_positions=1024)
    found = find_adapter(fingerprint(opened.model))
    assert found is not None
    assert torch.equal(opened.adapter.layers[3].basis, found.layers[3].basis)


def test_what_cannot_be_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4096 positions, and this run needs 4097"):
        open_model(str(folder), max_positions=4097)
    with pytest.raises(ModelLoadError, match=r"known architectures are qwen3-0\.6b"):
        open_model("qwen4", max_positions=64)
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        open_model(str(tmp_path), max_positions=64)
