"""What a model's cache looks like, and which models cannot have a tiered one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel

from penstock.core.errors import UnsupportedModelError
from penstock.core.shape import KVShape
from penstock.models.latents import caches_latents
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS

FULL = "full_attention"
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
RECURRENT = ("linear_attention", "conv")
BOTH = "hybrid"
"""A recurrence and full attention in one layer, as "hybrid_sliding" is with a sliding window."""
NOTHING = "dummy"
"""A layer without a cache."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The tiered layers of a model, and how long its other layers look back."""

    kv: KVShape
    tiered_layers: tuple[int, ...]
    """Model layer of each tiered layer."""
    windows: dict[int, int]
    """Window in tokens of each layer that is not tiered."""
    max_positions: int
    layer_types: tuple[str, ...]
    states: Mapping[int, int] = field(default_factory=dict)
    """How many states a recurrent layer has, by layer."""


def decoder_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


def inspect_model(model: PreTrainedModel) -> ModelShape:
    """Read a model's cache shape from its configuration.

    Raises:
        UnsupportedModelError: a tiered cache cannot work with this model; says why.
    """
    config = decoder_config(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; its cross-attention has no tiers"
        )
    if getattr(config, "index_topk", None) is not None:
        raise UnsupportedModelError(
            f"{name} selects tokens by an indexer of its own (DSA), whose keys have no tiers"
        )
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"{name} keeps an image's keys and values in layers of cross-attention, which have no "
            "tiers"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} does not use the attention interface of transformers, so that its attention "
            "cannot be streamed from disk; Llama, Qwen, Mistral, OPT, Phi-3, Granite, GPT-NeoX, "
            "Gemma and most newer decoders do"
        )
    layer_types, windows, states = _layer_types(config, name)
    tiered = tuple(i for i, kind in enumerate(layer_types) if kind in (FULL, BOTH))
    if not tiered and _is_idle_window(config):
        raise UnsupportedModelError(
            f"every layer of {name} has a sliding window, of {config.sliding_window:,} tokens, but "
            f"it has {config.max_position_embeddings:,} positions, so that the window hides "
            "nothing: set model.config.sliding_window = None"
        )
    if not tiered and not windows:
        raise UnsupportedModelError(
            f"no layer of {name} attends to keys and values: its recurrent states are small, and "
            "there is nothing to keep in tiers; use it without Penstock"
        )
    if not tiered:
        raise UnsupportedModelError(
            f"every layer of {name} has a sliding window, so that its cache is bounded already; "
            "use it without Penstock"
        )
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if heads < 1:
        raise UnsupportedModelError(
            f"{name} has no attention heads: nothing in it goes through the attention interface"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False):
        kv_heads = 1
    if not isinstance(kv_heads, int):
        raise UnsupportedModelError(f"layers of {name} have different numbers of KV heads")
    shape = KVShape(
        num_layers=len(tiered),
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=model.dtype,
    )
    if getattr(config, "kv_lora_rank", None) is not None:
        shape = _latent_shape(model, config, shape)
    if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(f"{name} is in {shape.dtype}; use float32, bfloat16 or float16")
    positions = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    return ModelShape(shape, tiered, windows, positions, tuple(layer_types), states)


def _latent_shape(model: PreTrainedModel, config: Any, shape: KVShape) -> KVShape:
    """Of multi-head latent attention: latents and what is rotated where the model's cache has
    those, expanded keys and values of all heads (transformers before 5.17) elsewhere."""
    rotated, rank = int(config.qk_rope_head_dim), int(config.kv_lora_rank)
    if caches_latents(model):
        return replace(
            shape, num_kv_heads=1, head_dim=rank + rotated, value_dim=rank, values_in_keys=True
        )
    width, values = int(config.qk_nope_head_dim) + rotated, int(config.v_head_dim)
    return replace(
        shape, num_kv_heads=shape.num_query_heads, head_dim=width,
        value_dim=None if values == width else values,
    )  # fmt: skip


def check_rope(model: PreTrainedModel, max_tokens: int) -> None:
    """Refuse sequences behind whose start all positions would have to be rotated anew.

    longrope has two sets of factors, and a model changes from one to the other, for all of a
    sequence, with the token that passes its original positions. Keys of a prompt's first chunks
    would have the wrong ones, and Phi-3 drops a cache there without a word.

    Args:
        max_tokens: most tokens of a sequence.

    Raises:
        UnsupportedModelError: says how long sequences may be.
    """
    config = decoder_config(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if "longrope" not in (each.get("rope_type"), each.get("type")):
            continue
        original = each.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if original is not None and max_tokens > original:
            raise UnsupportedModelError(
                f"{type(model).__name__} rotates all keys of a sequence anew when it passes "
                f"{original:,} tokens (longrope), which a cache that stores them cannot do; "
                f"sequences of up to {original:,} tokens (max_tokens) work, not of {max_tokens:,}"
            )


def drop_idle_window(config: Any) -> None:
    """Take a sliding window off the configuration of a model that is about to be made, if no
    prompt is long enough for it (Phi-4-mini's and those of long Phi-3s): it computes the same
    without, and its layers are full ones then."""
    decoder = config.get_text_config(decoder=True)
    if _is_idle_window(decoder):
        decoder.sliding_window = None


def _is_idle_window(config: Any) -> bool:
    """Whether one window is for all layers, and holds all positions."""
    window = getattr(config, "sliding_window", None)
    positions = getattr(config, "max_position_embeddings", None)
    said = getattr(config, "layer_types", None)
    return said is None and window is not None and positions is not None and window >= positions


def _layer_types(config: Any, name: str) -> tuple[list[str], dict[int, int], dict[int, int]]:
    """The kind of every layer, the windows of those that have one, the states of the recurrent."""
    count = int(config.num_hidden_layers)
    sharing = getattr(config, "kv_sharing_modes", None) or getattr(
        config, "num_kv_shared_layers", None
    )
    if sharing:
        raise UnsupportedModelError(f"{name} shares keys and values between layers")
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if types is None:
        if getattr(config, "layers_block_type", None) or getattr(config, "ssm_cfg", None):
            raise UnsupportedModelError(f"{name} has state-space or recurrent layers")
        kind = FULL
        if window is not None and getattr(config, "use_sliding_window", True):
            kind = "sliding_attention"
        elif chunk is not None:
            kind = "chunked_attention"
        types = [kind] * count
    types = ["dummy" if kind in ("moe", "mlp") else kind for kind in types]
    windows: dict[int, int] = {}
    states: dict[int, int] = {}
    for i, kind in enumerate(types):
        size = chunk if kind == "chunked_attention" else window
        known = (FULL, BOTH, NOTHING, *RECURRENT, *WINDOWED)
        if kind not in known or (kind in WINDOWED and size is None):
            raise UnsupportedModelError(
                f"layer {i} of {name} is {kind!r}; only full-attention, sliding-window and "
                "recurrent layers have a cache that is known here"
            )
        if kind in WINDOWED:
            windows[i] = int(cast(int, size))
        if kind in (BOTH, "hybrid_sliding", *RECURRENT):
            states[i] = int(getattr(config, "number_of_conv_states", 1))
    if states and not HAS_RECURRENT_LAYERS:
        raise UnsupportedModelError(
            f"{name} has recurrent layers, whose states Penstock keeps under transformers 5.24 or "
            f"newer; this is {transformers.__version__}"
        )
    return types, windows, states
