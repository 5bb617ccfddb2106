"""ModelSizes: the widths of a decoder, its bytes and its work, without its weights."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.regular_file import read_regular_text
from penstock.core.shape import KVShape
from penstock.kernels.packed_weights import GROUP

_TABLE = Path(__file__).parent / "model_sizes.toml"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "query_heads": "num_attention_heads",
}
_OTHERS = (
    "albert", "bert", "camembert", "deberta", "deberta-v2", "electra", "gpt_neox", "nemotron",
    "persimmon", "phi", "roberta", "starcoder2", "xlm-roberta",
)  # fmt: skip
"""Model types with the same fields and an MLP of two matrices, as far as they are known here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """A dense decoder with a gated MLP, as Llama and Qwen are."""

    name: str
    shape: KVShape
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""
    bits: int | None = None
    """Of packed weights; None: they are in the dtype of the cache."""

    @property
    def layer_weights(self) -> int:
        """Weights of one layer; norms and biases are too small to count."""
        return self.query_weights + self.hidden * (
            2 * self.shape.joint_dim + self._query_width + 3 * self.intermediate
        )

    @property
    def query_weights(self) -> int:
        """Weights of one layer's query projection."""
        return self.hidden * self._query_width

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All weights, the embedding once more where it is not shared."""
        embedding = 0 if self.tied else self.head_weights
        return self.shape.num_layers * self.layer_weights + self.head_weights + embedding

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ends = self.weights - self.shape.num_layers * self.layer_weights
        layers = self.layer_bytes(self.shape.num_layers * self.layer_weights)
        return int(layers + self.head_bytes(ends))

    def layer_bytes(self, weights: int) -> float:
        """Bytes of so many weights of the layers; in 4 bits with their scales and offsets."""
        if self.bits == 4:
            return weights * (0.5 + 2 * self.shape.dtype.itemsize / GROUP)
        return float(weights * (self.shape.dtype.itemsize if self.bits is None else 1))

    def head_bytes(self, weights: int) -> int:
        """Bytes of so many weights of embedding and output layer: 8 bits where any are packed."""
        return weights * (self.shape.dtype.itemsize if self.bits is None else 1)

    @property
    def _query_width(self) -> int:
        return self.shape.num_query_heads * self.shape.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """Floating-point operations of a prompt: weights twice a token, causal attention."""
        dense = 2.0 * tokens * self.shape.num_layers * self.layer_weights
        attention = 2.0 * tokens * tokens * self._query_width * self.shape.num_layers
        return dense + attention + 2.0 * self.head_weights


def known_models() -> Mapping[str, ModelSizes]:
    """The models of `model_sizes.toml` by name."""
    content = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return MappingProxyType({name: _from_entry(name, entry) for name, entry in content.items()})


def model_sizes(name_or_folder: str) -> ModelSizes:
    """Sizes of a known model, or of a folder with a config.json.

    Raises:
        ConfigError: neither; or a config.json that is no dense decoder with a gated MLP.
    """
    known = known_models()
    if name_or_folder in known:
        return known[name_or_folder]
    path = Path(name_or_folder).expanduser() / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{name_or_folder} is no folder with a config.json and no known model; known are "
            f"{', '.join(known)}"
        )
    return _from_config(path)


def _from_config(path: Path) -> ModelSizes:
    try:
        config: Any = json.loads(read_regular_text(path))
        entry = {name: int(config[key]) for name, key in _FIELDS.items()}
        heads = entry["query_heads"]
        entry["kv_heads"] = int(config.get("num_key_value_heads") or heads)
        entry["head_dim"] = int(config.get("head_dim") or entry["hidden"] // max(1, heads))
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    except KeyError as error:
        raise ConfigError(f"{path} has no {error}: not a decoder that can be predicted") from error
    if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{path} has experts, which the prediction does not know")
    if config.get("model_type") in _OTHERS:
        raise ConfigError(
            f"{path} is a {config['model_type']} model's; only decoders with a gated MLP can be "
            "predicted"
        )
    if _has_windows(config):
        raise ConfigError(
            f"{path} has layers with a sliding window, whose cache is small; the prediction knows "
            "full attention alone"
        )
    if min(entry.values()) < 1 or heads % entry["kv_heads"]:
        sizes = ", ".join(f"{name} {size}" for name, size in entry.items())
        raise ConfigError(f"{path} has sizes that no decoder has: {sizes}")
    return _from_entry(
        path.parent.name,
        entry
        | {
            "tied": bool(config.get("tie_word_embeddings", False)),
            "dtype": str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        },
    )


def _has_windows(config: Mapping[str, Any]) -> bool:
    """Whether a config has layers that see no more than a window, shorter than its positions."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return any(kind != "full_attention" for kind in kinds)
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return False
    positions = config.get("max_position_embeddings")
    return not isinstance(positions, int) or window < positions


def _from_entry(name: str, entry: Mapping[str, Any]) -> ModelSizes:
    dtype = entry.get("dtype", "bfloat16")
    if dtype not in _DTYPES:
        raise ConfigError(f"{name}: dtype {dtype} is not one of {', '.join(_DTYPES)}")
    return ModelSizes(
        name=name,
        shape=KVShape(
            num_layers=entry["layers"],
            num_query_heads=entry["query_heads"],
            num_kv_heads=entry["kv_heads"],
            head_dim=entry["head_dim"],
            dtype=_DTYPES[dtype],
        ),
        hidden=entry["hidden"],
        intermediate=entry["intermediate"],
        vocabulary=entry["vocabulary"],
        tied=entry["tied"],
    )
