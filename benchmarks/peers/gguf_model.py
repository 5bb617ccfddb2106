"""Convert a Qwen2, Qwen3 or Llama model from Hugging Face's format to GGUF, and quantise it.

    python gguf_model.py MODEL_FOLDER OUT.gguf            weights in bf16 as they are
    python gguf_model.py IN.gguf OUT.gguf q4_k_m          by llama.cpp's own quantiser
    python gguf_model.py --random CONFIG.json OUT.gguf    Q4_0 of random codes, a tensor at a time

The files have no vocabulary: the benchmark hands out token ids.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

QUANTISED = ("q4_0", "q4_k_m")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_KNOWN = ("llama", "qwen2", "qwen3")
_Q4_0, _Q6_K = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q6_K
_SCALE_AT = {_Q4_0: 0, _Q6_K: 208}
"""Where in a block its float16 scale lies."""
_SCALES = {_Q4_0: 0.0035, _Q6_K: 9e-6}
"""That give random codes a standard deviation near 0.016 in both kinds."""


def gguf_name(name: str) -> str:
    """GGUF's name of a weight: "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight"."""
    stem, kind = name.removeprefix("model.").rsplit(".", 1)
    parts = stem.split(".", 2)
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    return f"{_OTHER_NAMES[parts[0]]}.{kind}"


def read_weights(folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and the bits of bf16 weights, as unsigned 16-bit integers."""
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}, not BF16"
            start, end = entry["data_offsets"]
            bits = np.memmap(
                path, dtype=np.uint16, mode="r", offset=8 + size + start, shape=(end - start) // 2
            )
            yield name, bits.reshape(entry["shape"])


def convert(folder: Path, out: Path) -> None:
    """Write a folder's weights as a GGUF file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = _begin(out, config, gguf.LlamaFileType.MOSTLY_BF16)
    for name, bits in read_weights(folder):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        values = _in_order(name, bits, config)
        if values.ndim == 1:  # norms and biases are kept in 32 bits
            wide = values.astype(np.uint32) << 16
            writer.add_tensor(gguf_name(name), wide.view(np.float32))
        else:
            writer.add_tensor(
                gguf_name(name), values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random(config_file: Path, out: Path, seed: int = 0) -> None:
    """Write random 4-bit codes, as many as the config's matrices have, one tensor in memory.

    Embeddings and output layer are Q6_K, as llama.cpp's quantiser leaves an output layer.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    writer = _begin(out, config, gguf.LlamaFileType.MOSTLY_Q4_0)
    shapes = _shapes(config)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
            continue
        kind = _kind_of(name)
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), stored[0] * stored[1], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(_random_blocks(shape, _kind_of(name), draw))
    writer.close()


def quantise(source: Path, out: Path, kind: str, threads: int = 2) -> None:
    """Have llama.cpp quantise a GGUF file.

    Raises:
        RuntimeError: it could not.
    """
    import llama_cpp as llama

    wanted = llama.llama_model_quantize_default_params()
    wanted.nthread = threads
    wanted.ftype = {
        "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0, "q4_k_m": llama.LLAMA_FTYPE_MOSTLY_Q4_K_M
    }[kind]  # fmt: skip
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(wanted)):
        raise RuntimeError(f"llama.cpp could not quantise to {kind}")


def _begin(out: Path, config: dict[str, Any], kind: gguf.LlamaFileType) -> gguf.GGUFWriter:
    assert config["model_type"] in _KNOWN, f"only {_KNOWN} are known here"
    heads, width = config["num_attention_heads"], _head_width(config)
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_name(out.stem)
    writer.add_file_type(kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    return writer


def _in_order(name: str, bits: np.ndarray[Any, Any], config: dict[str, Any]) -> Any:
    """Llama's queries and keys: GGUF has the two of each rotation beside each other."""
    heads = {
        "q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]
    }.get(name.split(".")[-2])  # fmt: skip
    if config["model_type"] != "llama" or heads is None:
        return bits
    turned = bits.reshape(heads, 2, len(bits) // heads // 2, *bits.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(turned).reshape(bits.shape)


def _head_width(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's tensors."""
    assert config["model_type"] == "llama", "random codes are made for Llama alone"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = _head_width(config)
    queries, keys = (
        width * config[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    layer = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden),
        "attn_v": (keys, hidden), "attn_output": (hidden, queries), "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    ends = (config["vocab_size"], hidden)
    shapes = {"token_embd.weight": ends, "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = ends
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _kind_of(name: str) -> gguf.GGMLQuantizationType:
    return _Q6_K if name in ("token_embd.weight", "output.weight") else _Q4_0


def _random_blocks(
    shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, draw: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Random codes with one scale in all blocks. uint8 [rows, row_bytes]"""
    stored = gguf.quant_shape_to_byte_shape(shape, kind)
    data = np.frombuffer(draw.bytes(stored[0] * stored[1]), np.uint8).copy()
    blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    at = _SCALE_AT[kind]
    blocks[:, at : at + 2] = np.frombuffer(np.float16(_SCALES[kind]).tobytes(), np.uint8)
    return data.reshape(stored)


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments[0] == "--random":
        write_random(Path(arguments[1]), Path(arguments[2]))
    elif len(arguments) == 3:
        quantise(Path(arguments[0]), Path(arguments[1]), arguments[2])
    else:
        convert(Path(arguments[0]), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
