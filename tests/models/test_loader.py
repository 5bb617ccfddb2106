"""The loader gives a model that works, or one clear line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi3ForCausalLM

from penstock import LLM, SamplingParams
from penstock.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from penstock.models.kv_shapes import kv_shape
from penstock.models.loader import lasting_name, load

RECALL = Path(__file__).parents[2] / "src" / "penstock" / "models" / "recall"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model that a test may damage."""
    return Path(shutil.copytree(RECALL, tmp_path / "copy"))


def test_the_bundled_model_is_the_default() -> None:
    loaded = load()
    assert loaded.name == "recall"
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("The grass is green .")["input_ids"][0] == 1


def test_a_folder_and_a_dtype(folder: Path) -> None:
    assert load(folder, dtype="float32").model.dtype == torch.float32
    assert load(str(folder), dtype=torch.float16).model.dtype == torch.float16


def test_bundled_name_wins_over_a_folder_of_that_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "recall").mkdir()
    monkeypatch.chdir(folder.parent)
    load("recall")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load("./recall")


def test_names_that_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert lasting_name("./copy") == lasting_name("copy") == str(folder)
    assert lasting_name(str(folder)) == str(folder)
    folder.rename(folder.parent / "recall")
    for name in ("recall", "recall-2", "some-org/some-model", "LlamaForCausalLM", ""):
        assert lasting_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "some-org/some-model", "no such name", "~nobody-here/model", "long" * 99],
)
def test_missing(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"no model folder {name}"):
        load(name)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a file"):
        load(folder / "config.json")


@pytest.mark.parametrize(
    ("config", "said"),
    [("{nope", "not a valid JSON"), ("{}", "model_type"), ('{"model_type": "zzz"}', "zzz")],
)
def test_unreadable_config(folder: Path, config: str, said: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=said):
        load(folder)


@pytest.mark.parametrize("weights", [b"not weights", None])
def test_unreadable_weights(folder: Path, weights: bytes | None) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()[:100_000] if weights is None else weights
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="deserializing header"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no file named model\.safetensors"):
        load(folder)


def test_a_missing_tensor_is_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.input_layernorm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 tensors are missing \(model\.layers\.3"):
        load(folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "said"), [("t5", "encoder-decoder"), ("vit", "no causal language model")]
)
def test_not_a_causal_decoder(folder: Path, model_type: str, said: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=said):
        load(folder)


def test_a_window_that_holds_all_positions_is_none(folder: Path) -> None:
    """As Phi-4-mini's, 262,144 tokens of 131,072: nothing is ever outside of it."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=1472, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        sliding_window=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = Phi3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    assert kv_shape(folder).num_layers == 2
    ids = torch.arange(5, 65)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 60:].tolist()
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = LLM(load(folder), policy="full", store="memory").generate(ids[0].tolist(), params)
    assert output.token_ids == expected


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match="dtype='float8'"):
        load(dtype="float8")
    with pytest.raises(ConfigError, match="not a device"):
        load(device="tpu9000")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA"):
            load(device="cuda")
