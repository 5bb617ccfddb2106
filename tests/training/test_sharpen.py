"""Sharper attention: all of its logits times one number, and nothing else."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.models.loader import load
from training.checkpoint import TOKENIZER_FOLDER
from training.sharpen import main

IDS = torch.arange(4, 68)[None]


def probabilities(folder: Path, scaling: float = 1.0) -> torch.Tensor:
    """What a model says behind every token, its attention's own scale times `scaling`."""
    model = load(folder, dtype="float32").model
    for layer in model.model.layers:
        layer.self_attn.scaling *= scaling
    with torch.no_grad():
        said: torch.Tensor = model(IDS).logits.softmax(-1)
    return said


def test_all_logits_of_attention_are_larger(tmp_path: Path) -> None:
    out = tmp_path / "sharp"
    assert main([str(TOKENIZER_FOLDER), "--by", "2", "--out", str(out)]) == 0
    torch.testing.assert_close(
        probabilities(out), probabilities(TOKENIZER_FOLDER, 2.0), atol=1e-5, rtol=1e-4
    )
    off = (probabilities(out) - probabilities(TOKENIZER_FOLDER)).abs().max()
    assert off > 0.01, "that makes a difference"
    before, after = (load_file(f / "model.safetensors") for f in (TOKENIZER_FOLDER, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_norm.weight" for i in range(8)}
    said = load(out).tokenizer
    assert said is not None
    assert said.get_vocab()["Question"] > 0
    assert "model.safetensors" in (out / "SHA256SUMS").read_text()


def test_what_cannot_be_sharpened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(TOKENIZER_FOLDER)
    for by in ("0", "-1", "inf", "nan"):
        assert main([model, "--by", by, "--out", str(tmp_path / "x")]) == 2
        assert "must be above 0" in capsys.readouterr().err
    assert main([model, "--by", "1.1", "--out", model]) == 2
    assert "is the model itself" in capsys.readouterr().err
    other = tmp_path / "other"
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=10,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER_FOLDER / name, other / name)
    assert main([str(other), "--by", "1.1", "--out", str(tmp_path / "x")]) == 2
    assert "is no Qwen3" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
