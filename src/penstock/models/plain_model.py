"""The plain model to measure against: random weights of a known architecture, and plain caches."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)
from transformers.cache_utils import Cache, CacheLayerMixin

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LayerAdapter, LowRankAdapter
from penstock.kernels.key_rotation import BLOCK_TOKENS
from penstock.models.fingerprint import fingerprint
from penstock.models.key_rotations import key_rotations
from penstock.models.latents import joined
from penstock.models.model_shape import decoder_config, inspect_model
from penstock.models.own_cache import dynamic_cache
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS

PlainKind = Literal["dynamic", "static"]

_PEAK = 4.5
"""Range of the components of synthetic keys, which are normal."""


def _qwen3(positions: int) -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=max(40960, positions),
    )  # fmt: skip


def _llama(positions: int) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=max(131072, positions),
    )  # fmt: skip


def _qwen3_8b(positions: int) -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
        max_position_embeddings=max(40960, positions),
    )  # fmt: skip


def _opt_125m(positions: int) -> PretrainedConfig:
    return OPTConfig(
        hidden_size=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12,
        vocab_size=50272, max_position_embeddings=max(2048, positions),
    )  # fmt: skip


def _opt_6_7b(positions: int) -> PretrainedConfig:
    return OPTConfig(
        hidden_size=4096, ffn_dim=16384, num_hidden_layers=32, num_attention_heads=32,
        vocab_size=50272, word_embed_proj_dim=4096, max_position_embeddings=max(2048, positions),
    )  # fmt: skip


def _qwen_7b(positions: int) -> PretrainedConfig:
    """Every head has keys and values of its own; as Qwen1.5-7B, which transformers reads as Qwen2
    and whose KV is that of Qwen-7B."""
    return Qwen2Config(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=151936, tie_word_embeddings=False,
        max_position_embeddings=max(32768, positions),
    )  # fmt: skip


def _qwen3_5(positions: int) -> PretrainedConfig:
    """Three layers of linear attention to one of full attention; text alone."""
    return transformers.Qwen3_5TextConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, vocab_size=248320, linear_num_key_heads=16,
        linear_num_value_heads=16, tie_word_embeddings=True,
        max_position_embeddings=max(262144, positions),
    )  # fmt: skip


def _llama_1b(positions: int) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=max(131072, positions),
    )  # fmt: skip


def _qwen2_5_vl_3b(positions: int) -> PretrainedConfig:
    """The text decoder of Qwen2.5-VL-3B, which decodes alone once a video is read: Qwen2's layers.
    Positions on three axes are one number each for text, so that they change no step's work."""
    return Qwen2Config(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=max(128000, positions),
    )  # fmt: skip


def _qwen2_5_vl_7b(positions: int) -> PretrainedConfig:
    """As `_qwen2_5_vl_3b`, of Qwen2.5-VL-7B."""
    return Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
        max_position_embeddings=max(128000, positions),
    )  # fmt: skip


def _internvl3_14b(positions: int) -> PretrainedConfig:
    """The text decoder of InternVL3-14B: Qwen2.5-14B's, with a vocabulary of its own."""
    return Qwen2Config(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40,
        num_key_value_heads=8, vocab_size=151674, tie_word_embeddings=False,
        max_position_embeddings=max(32768, positions),
    )  # fmt: skip


def _tiny(positions: int) -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=512, tie_word_embeddings=True,
        max_position_embeddings=max(4096, positions),
    )  # fmt: skip


ARCHITECTURES: Mapping[str, Callable[[int], PretrainedConfig]] = MappingProxyType(
    {
        "qwen3-0.6b": _qwen3,
        "qwen3-8b": _qwen3_8b,
        "llama-3.1-8b": _llama,
        "llama-3.2-1b": _llama_1b,
        "opt-125m": _opt_125m,
        "opt-6.7b": _opt_6_7b,
        "qwen-7b": _qwen_7b,
        **({"qwen3.5-0.8b": _qwen3_5} if HAS_RECURRENT_LAYERS else {}),
        "qwen2.5-vl-3b": _qwen2_5_vl_3b,
        "qwen2.5-vl-7b": _qwen2_5_vl_7b,
        "internvl3-14b": _internvl3_14b,
        "tiny": _tiny,
    }
)
"""Configurations by name, from the number of positions wanted."""


def random_model(
    name: str,
    *,
    max_positions: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    layers: int | None = None,
) -> PreTrainedModel:
    """A model of a known architecture with random weights, in evaluation mode.

    Args:
        layers: only so many of its first layers; None: all.

    Raises:
        ConfigError: no such architecture.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"there is no configuration {name!r}; choose from {list(ARCHITECTURES)}")
    config = ARCHITECTURES[name](max_positions)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same tensors, with a configuration and hooks of its own."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def plain_cache(model: PreTrainedModel, kind: PlainKind, max_tokens: int) -> Cache:
    """An empty cache of transformers itself; `max_tokens` is what a static one preallocates."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=max_tokens)
    return dynamic_cache(model)


def attending_layers(cache: Cache) -> list[int]:
    """The layers of a plain cache that keep keys and values."""
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


def put_tokens(cache: Cache, layer: int, shape: KVShape, keys: Tensor, values: Tensor) -> None:
    """Append tokens to one layer of a plain cache; the inverse of `tokens_of`."""
    if shape.values_in_keys:
        keys, values = values, keys[..., shape.value_width :]
    target: Any = cache.layers[layer]
    if not isinstance(cache, StaticCache):
        target.update(keys, values)
        return
    if not target.is_initialized:
        target.lazy_initialization(keys, values)
    counter = getattr(target, "cumulative_length", None)  # transformers 5.2 looks at the keys
    start = int(cache.get_seq_length(layer) if counter is None else counter)
    count = keys.shape[2]
    target.keys[:, :, start : start + count] = keys
    target.values[:, :, start : start + count] = values
    if counter is not None:
        counter.add_(count)


def tokens_of(cache: Cache, layer: int, shape: KVShape) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer of a DynamicCache, as the tiers of a model of `shape` have them;
    both [batch, kv_heads, tokens, width]."""
    cached: Any = cache.layers[layer]
    return joined(shape, cached.keys, cached.values)


def random_adapter(model: PreTrainedModel, seed: int = 0) -> LowRankAdapter:
    """One random orthonormal basis for all layers, so that no fitting enters a measurement."""
    shape = inspect_model(model)
    draw = torch.Generator().manual_seed(seed)
    joint = shape.kv.joint_dim
    basis = torch.linalg.qr(torch.randn(joint, joint, generator=draw))[0].contiguous()
    layers = [
        LayerAdapter(basis, torch.full((joint,), _PEAK), block_tokens=BLOCK_TOKENS if turns else 0)
        for turns in key_rotations(model, shape)
    ]
    return LowRankAdapter(layers, fingerprint(model), 0)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Token ids that the model knows."""
    return int(decoder_config(model).vocab_size)
