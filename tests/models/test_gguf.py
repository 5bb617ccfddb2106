"""A GGUF file is a model: dequantised once, kept, and found again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock import LLM, SamplingParams, load
from penstock.core.errors import ModelLoadError, UnsupportedModelError
from penstock.models import gguf_file
from penstock.models.loader import lasting_name
from penstock.testing.tiny_chat import tiny_chat_model
from tests.pretrained import CONVERTED, GGUF

gguf = pytest.importorskip("gguf")
WIDTH, HEADS, KV_HEADS = 64, 4, 2
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_file, "gguf_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp keeps rows of queries and keys: the two of each rotation beside each other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write(path: Path, weights: dict[str, np.ndarray], architecture: str = "llama") -> Path:
    """A tiny model's file with 8-bit matrices, and its byte tokenizer."""
    tokenizer = tiny_chat_model().tokenizer
    assert tokenizer is not None
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merged = [tokens[3:5], tokens[4:6]]  # a single one would be read as no list by some releases
    tokens += map("".join, merged)
    writer: Any = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(7)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(pair) for pair in merged])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
            continue
        packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors() -> dict[str, np.ndarray]:
    """A tiny model's weights under llama.cpp's names."""
    state = {name: weight.numpy() for name, weight in tiny_chat_model().model.state_dict().items()}
    found = {
        "token_embd.weight": _with_merged(state["model.embed_tokens.weight"]),
        "output.weight": _with_merged(state["lm_head.weight"]),
        "output_norm.weight": state["model.norm.weight"],
    }
    for layer in range(2):
        for theirs, ours in NAMES.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                weight = interleaved(weight, HEADS if ours == "attn_q" else KV_HEADS)
            found[f"blk.{layer}.{ours}.weight"] = weight
    return found


def _with_merged(weight: np.ndarray) -> np.ndarray:
    """With rows of the merged tokens."""
    return np.concatenate([weight, np.zeros((2, WIDTH), np.float32)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.Q8_0.gguf", tensors())


def test_a_file_is_a_model(file: Path, cache: Path) -> None:
    told: list[str] = []
    loaded = load(file, on_bytes=lambda what, done, total: told.append(what))
    original = tiny_chat_model().model.state_dict()
    for name, weight in loaded.model.state_dict().items():
        like = weight[: len(original[name])].float()  # less the merged tokens' rows
        torch.testing.assert_close(like, original[name], rtol=0.02, atol=0.02)
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    [notice] = loaded.notices
    assert notice.startswith("dequantised, which takes ")
    assert f"KiB in {folder}; it can be removed" in notice
    assert {f"reading {file.name}", f"writing {folder}"} == set(told)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer("it is")["input_ids"][-5:]) == "it is"
    [output] = LLM(loaded, store="memory").generate([5, 6, 7, 8], PARAMS)
    assert len(output.token_ids) > 0
    assert notice in output.run.notices


def test_it_is_converted_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(file)
    (cache / "converting-killed").mkdir()
    monkeypatch.setattr(gguf_file, "_convert", None)  # would fail
    moved = file.rename(file.with_name("moved.gguf").with_stem(file.stem))
    again = load(moved, dtype="float32")
    assert again.notices == ()
    assert again.model.dtype == torch.float32
    ours, theirs = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(weight.float(), theirs[name]) for name, weight in ours.items())


def test_another_file_of_that_name_is_another_model(file: Path) -> None:
    load(file)
    write(file, {name: weight * 2 for name, weight in tensors().items()})
    assert load(file).notices


def test_a_failed_conversion_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(reader: Any) -> torch.dtype:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(gguf_file, "_dtype", full)
    with pytest.raises(OSError, match="No space left on device"):
        load(file)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_what_is_no_model(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    for content in (b"", b"GGUX" * 100):
        other.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"other\.gguf: it is no GGUF file"):
            load(other)
    other.write_bytes(b"GGUF" * 100)
    with pytest.raises(ModelLoadError, match=r"other\.gguf: "):
        load(other)
    part = other.rename(tmp_path / "big-00002-of-00003.gguf")
    with pytest.raises(ModelLoadError, match="one of several parts"):
        load(part)


def test_what_cannot_work_is_refused(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "it.gguf", tensors(), "mamba")
    with pytest.raises((ModelLoadError, UnsupportedModelError)):
        load(file)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_without_the_library(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ModelLoadError, match=r"pip install 'penstock\[gguf\]'"):
        load(file)


def test_a_files_name_lasts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert lasting_name(file.name) == str(file)


@pytest.mark.slow
def test_a_real_file_is_its_folder(smollm2_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's own, against what the library of such files reads. Converted once a checkout."""
    monkeypatch.setattr(gguf_file, "gguf_cache", lambda: smollm2_home / CONVERTED)
    loaded: Any = load(smollm2_home / GGUF)
    assert loaded.notices == ()
    held = {each.name: each for each in gguf.GGUFReader(smollm2_home / GGUF).tensors}
    config, layers = loaded.model.config, loaded.model.model.layers
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for place in (0, 29):
        for name, theirs in NAMES.items():
            module = layers[place].get_submodule(name)
            packed = held[f"blk.{place}.{theirs}.weight"]
            wanted = gguf.quants.dequantize(packed.data, packed.tensor_type)
            found = module.weight.detach().float().numpy()
            if theirs in heads:
                found = interleaved(found, heads[theirs])
            np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=0)  # bfloat16
    tokenizer = loaded.tokenizer
    text = "The capital of France is"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert "<|im_start|>" in tokenizer.chat_template


def test_weights_are_kept_in_a_type_of_their_own(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "it.gguf", tensors())
    load(path)
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    [weights] = folder.glob("*.safetensors")
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.bfloat16}
