"""A model folder's own Python code is never run, and nobody is asked whether it may be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import ModelLoadError
from penstock.models import loader
from penstock.models.kv_shapes import kv_shape
from penstock.models.loader import BUNDLED, load
from penstock.models.reward_model import RewardModelScorer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
(Path({folder!r}) / "ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model beside Python code; whoever is asked says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    copy = tmp_path / "copy"
    shutil.copytree(Path(loader.__file__).parent / BUNDLED, copy)
    (copy / "own.py").write_text(CODE.format(folder=str(copy)))
    return copy


def write(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


OWN = {each: f"own.{'OwnConfig' if each == 'AutoConfig' else 'OwnModel'}" for each in CLASSES}


@pytest.mark.parametrize("opener", [load, kv_shape, RewardModelScorer])
def test_a_model_of_its_own_is_refused(
    opener: Callable[[Path], object], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, model_type="own", auto_map=OWN)
    with pytest.raises(ModelLoadError, match=r"needs Python code of its own.* does not run"):
        opener(folder)
    assert not (folder / "ran").exists()
    assert capsys.readouterr().out == ""


def test_a_model_that_transformers_knows_works_without_its_code(folder: Path) -> None:
    write(folder, auto_map=OWN)
    assert type(load(folder).model).__name__ != "OwnModel"
    assert kv_shape(folder).num_layers == 8
    assert not (folder / "ran").exists()
