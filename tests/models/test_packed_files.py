"""4-bit and 8-bit weights of other formats: their codes are ours, and say what they said there."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import LLM, load
from penstock.core.errors import ConfigError, UnsupportedModelError
from penstock.models import gguf_file
from penstock.models.packed import kept
from penstock.models.packed.form import Form
from penstock.models.packed.modules import packed_modules
from penstock.models.packed.rows import read_packed
from penstock.testing.tiny_chat import tiny_chat_model
from tests.models.test_gguf import tensors, write

gguf = pytest.importorskip("gguf")
IDS = torch.arange(3, 43)[None]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each half byte of a word, lowest first."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "weights_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(gguf_file, "gguf_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight columns in a word. [n, 8 * m] to int32 [n, m]"""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(order):
        packed |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32))


def coded(folder: Path, method: str, *, ordered: bool = True) -> Path:
    """A tiny model's folder in a format, and beside it, in `plain`, what its codes say."""
    tiny_chat_model(folder=folder / "plain")
    state = load_file(folder / "plain" / "model.safetensors")
    made: dict[str, Tensor] = {}
    draw = np.random.default_rng(0)
    for name, weight in state.items():
        if not name.endswith("proj.weight"):
            made[name] = weight
            continue
        rows, width = weight.shape
        groups = np.arange(width) // GROUP
        if not ordered:
            groups = draw.permutation(groups)
        codes = draw.integers(0, 16, (width, rows))
        zeros = draw.integers(1, 16, (width // GROUP, rows))
        scales = draw.uniform(0.002, 0.02, (width // GROUP, rows)).astype(np.float32)
        plain = (codes - zeros[groups]) * scales[groups]
        state[name] = torch.from_numpy(np.ascontiguousarray(plain.T)).float()
        stem = name.removesuffix("weight")
        made[f"{stem}scales"] = torch.from_numpy(scales)
        if method == "awq":
            made[f"{stem}qweight"] = words(codes, AWQ_ORDER)
            made[f"{stem}qzeros"] = words(zeros, AWQ_ORDER)
        else:
            made[f"{stem}qweight"] = words(codes.T).T.contiguous()
            made[f"{stem}qzeros"] = words(zeros - 1)
            made[f"{stem}g_idx"] = torch.from_numpy(groups.astype(np.int32))
    save_file(state, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    tiny_chat_model(folder=folder / "coded")
    save_file(made, folder / "coded" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "coded" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP}
    (folder / "coded" / "config.json").write_text(json.dumps(config))
    return folder / "coded"


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "ordered"), [("gptq", True), ("awq", True), ("gptq", False)], ids=str
)
def test_a_folder_says_what_its_codes_say(method: str, ordered: bool, tmp_path: Path) -> None:
    folder = coded(tmp_path, method, ordered=ordered)
    plain = load(tmp_path / "plain", dtype="float32").model(IDS).logits
    loaded = load(folder, dtype="float32")
    layer = loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    assert layer.forms["weight"] == Form(4, GROUP)
    assert "int4" in loaded.notices[0]
    tolerance = 0.02 if ordered else 0.15  # groups in another order are packed anew
    for model in (loaded.model, load(folder, dtype="float32").model):  # made, and mapped
        assert (model(IDS).logits - plain).norm() < tolerance * plain.norm()
    assert LLM(folder, quantization=method, dtype="float32").model is not None
    with pytest.raises(ConfigError, match="quantised already"):
        load(folder, weights="int8")


def test_other_bits_and_layouts_are_refused(tmp_path: Path) -> None:
    folder = coded(tmp_path, "awq")
    text = (folder / "config.json").read_text()
    for there, here, said in (
        ('"bits": 4', '"bits": 3', "3 bits"),
        ('"bits": 4', '"bits": 4, "version": "gemv"', "gemv"),
    ):
        (folder / "config.json").write_text(text.replace(there, here))
        with pytest.raises(UnsupportedModelError, match=said):
            load(folder)


def stored(kind: str, rows: int, width: int) -> Any:
    """A tensor as gguf's reader has it: random blocks, their scales of a usual size."""
    kinds = gguf.GGMLQuantizationType
    block, size = gguf.GGML_QUANT_SIZES[kinds[kind]]
    draw = np.random.default_rng(1)
    data = draw.integers(0, 256, (rows, width // block, size), np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q8_0": [0], "Q6_K": [size - 2]}
    for at in halves[kind]:
        scale = draw.uniform(0.001, 0.02, data.shape[:2]).astype(np.float16)
        data[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return SimpleNamespace(
        shape=(width, rows), tensor_type=kinds[kind], data=data.reshape(rows, -1)
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K"])
def test_blocks_of_gguf_are_what_its_library_says(kind: str) -> None:
    from penstock.models.packed.gguf_rows import GgufRows

    tensor = stored(kind, 128, 512)
    order = torch.arange(128).flip(0)
    source = GgufRows(tensor, order)
    assert source.form == {"Q6_K": None, "Q8_0": Form(8)}.get(kind, Form(4, GROUP))
    form = source.form or Form(8)
    said = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).flip(0)
    made = form.view(read_packed(source, form, torch.float32), 512, torch.float32).plain(0, 128)
    if kind == "Q6_K":  # 8 bits for 32 columns, of 6 bits for 16
        assert (made - said).norm() < 0.01 * said.norm()
    else:
        torch.testing.assert_close(made, said, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_gguf_file_is_packed_without_being_dequantised(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "tiny.gguf", tensors())
    plain = load(file, dtype="float32").model(IDS).logits
    before = {path.name for path in cache.iterdir()}
    loaded = load(file, weights="int8", dtype="float32")
    assert len(packed_modules(loaded.model)) == 14, "all of two layers"
    assert (loaded.model(IDS).logits - plain).norm() < 1e-2 * plain.norm()
    new = {path.name for path in cache.iterdir()} - before
    assert any(name.startswith("tiny-int8") for name in new)
    assert LLM(loaded, quantization="int8").tokenizer is not None
