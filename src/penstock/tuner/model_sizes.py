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
class BesideLayers:
    """A hybrid's layers without keys and values, all together."""

    recurrent: int = 0
    """Those that have a state."""
    weights: int = 0
    """That a token goes through, MLPs included."""
    state_bytes: int = 0
    """States of one sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """A decoder with a gated MLP, as Llama and Qwen are; of a hybrid, its full-attention layers and
    what is beside them."""

    name: str
    shape: KVShape
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""
    bits: int | None = None
    """Of packed weights; None: they are in the dtype of the cache."""
    gated: bool = False
    """The query's projection makes a gate as wide as the query too."""
    beside: BesideLayers = BesideLayers()
    """Layers without keys and values."""
    idle_weights: int = 0
    """Of experts that a token does not ask. More of a batch ask more of them, which is not
    counted."""

    @property
    def layer_weights(self) -> int:
        """Weights of one layer; norms and biases are too small to count."""
        return self.query_weights + self.hidden * (
            2 * self.shape.joint_dim + self._query_width + 3 * self.intermediate
        )

    @property
    def query_weights(self) -> int:
        """Weights of one layer's query projection."""
        return self.hidden * self._query_width * (2 if self.gated else 1)

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All weights, the embedding once more where it is not shared."""
        embedding = 0 if self.tied else self.head_weights
        return self._inner_weights + self.head_weights + embedding

    @property
    def _inner_weights(self) -> int:
        """Of all layers."""
        own = self.shape.num_layers * self.layer_weights
        return own + self.beside.weights + self.idle_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ends = self.weights - self._inner_weights
        return int(self.layer_bytes(self._inner_weights) + self.head_bytes(ends))

    def layer_bytes(self, weights: int) -> float:
        """Bytes of so many weights of the layers; in 4 bits with their scales and offsets."""
        if self.bits == 4:
            return weights * (0.5 + 2 * self.shape.dtype.itemsize / GROUP)
        return self.head_bytes(weights)

    def head_bytes(self, weights: int) -> float:
        """Bytes of so many weights of embedding and output layer: 8 bits where any are packed."""
        size = self.shape.dtype.itemsize
        return weights * (float(size) if self.bits is None else 1 + size / GROUP)

    @property
    def _query_width(self) -> int:
        return self.shape.num_query_heads * self.shape.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """Floating-point operations of a prompt: weights twice a token, causal attention. What a
        recurrence costs beside its weights is little, and not counted."""
        dense = 2.0 * tokens * (self.shape.num_layers * self.layer_weights + self.beside.weights)
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
        config = {**config, **(config.get("text_config") or {})}  # of a model that sees
        entry = {name: int(config[key]) for name, key in _FIELDS.items()}
        heads = entry["query_heads"]
        entry["kv_heads"] = int(config.get("num_key_value_heads") or heads)
        entry["head_dim"] = int(config.get("head_dim") or entry["hidden"] // max(1, heads))
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    except KeyError as error:
        raise ConfigError(f"{path} has no {error}: not a decoder that can be predicted") from error
    if config.get("kv_lora_rank"):
        raise ConfigError(f"{path} has latent attention, which the prediction does not know")
    if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{path} has experts, which the prediction does not know")
    if config.get("model_type") in _OTHERS:
        raise ConfigError(
            f"{path} is a {config['model_type']} model's; only decoders with a gated MLP can be "
            "predicted"
        )
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "linear_num_value_heads" in config:
        entry["layers"] = kinds.count("full_attention")
        hybrid = _delta_net(config, kinds)
    elif _has_windows(config):
        raise ConfigError(
            f"{path} has layers with a sliding window, whose cache is small; the prediction knows "
            "full attention alone"
        )
    else:
        hybrid = {}
    if min(entry.values()) < 1 or heads % entry["kv_heads"]:
        sizes = ", ".join(f"{name} {size}" for name, size in entry.items())
        raise ConfigError(f"{path} has sizes that no decoder has: {sizes}")
    return _from_entry(
        path.parent.name,
        entry
        | hybrid
        | {
            "tied": bool(config.get("tie_word_embeddings", False)),
            "dtype": str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        },
    )


def _delta_net(config: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    """What a table's entry says of the linear layers of a Qwen3.5.

    Raises:
        ConfigError: there are layers of other kinds.
    """
    if set(kinds) - {"full_attention", "linear_attention"}:
        raise ConfigError(f"layers of kinds {sorted(set(kinds))} are not known to the prediction")
    beside = {
        "recurrent": kinds.count("linear_attention"),
        "key_heads": int(config["linear_num_key_heads"]),
        "key_dim": int(config["linear_key_head_dim"]),
        "value_heads": int(config["linear_num_value_heads"]),
        "value_dim": int(config["linear_value_head_dim"]),
        "conv": int(config["linear_conv_kernel_dim"]),
    }
    return {"beside": beside, "gated": True}


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
    beside = dict(entry.get("beside", {}))
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
        gated=entry.get("gated", False),
        beside=_beside(beside, entry, _DTYPES[dtype].itemsize),
        idle_weights=entry.get("idle_weights", 0),
    )


def _beside(given: dict[str, Any], entry: Mapping[str, Any], itemsize: int) -> BesideLayers:
    """The layers beside full attention, from their widths.

    A state is kept in float32, the newest inputs of its convolution in the model's dtype. Gated
    DeltaNet (arXiv 2412.06464) has `key_heads`; Mamba-2 (arXiv 2405.21060) has `groups`.
    """
    hidden, count = entry["hidden"], given.get("recurrent", 0)
    weights, state = given.get("mlp_weights", 0), 0
    if "key_heads" in given:
        keys = given["key_heads"] * given["key_dim"]
        values = given["value_heads"] * given["value_dim"]
        mixer = hidden * (2 * keys + 3 * values + 2 * given["value_heads"])
        weights += count * (mixer + 3 * hidden * entry["intermediate"])
        state = 4 * values * given["key_dim"] + (2 * keys + values) * given["conv"] * itemsize
    elif "groups" in given:
        inner = given["heads"] * given["head_dim"]
        shared = 2 * given["groups"] * given["state"]
        weights += count * hidden * (3 * inner + shared + given["heads"])
        state = 4 * inner * given["state"] + (inner + shared) * given["conv"] * itemsize
    return BesideLayers(recurrent=count, weights=weights, state_bytes=count * state)
