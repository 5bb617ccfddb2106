"""Convert a Qwen3 model from Hugging Face's format to GGUF, weights in bf16 as they are.

    python gguf_model.py MODEL_FOLDER OUT.gguf

The file has no vocabulary: the benchmark hands out token ids.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

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


def gguf_name(name: str) -> str:
    """GGUF's name of a weight: "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight"."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return f"{_OTHER_NAMES[parts[0]]}.weight"


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
    """Write the GGUF file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3", "only Qwen3 is known here"
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in read_weights(folder):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if bits.ndim == 1:  # norms are kept in 32 bits
            wide = bits.astype(np.uint32) << 16
            writer.add_tensor(gguf_name(name), wide.view(np.float32))
        else:
            writer.add_tensor(
                gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
