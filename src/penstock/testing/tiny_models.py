"""Random models of many families that run on a CPU in milliseconds."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 160
POSITIONS = 512

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _opt() -> PreTrainedConfig:
    return OPTConfig(
        vocab_size=VOCABULARY, hidden_size=48, word_embed_proj_dim=48, ffn_dim=64,
        num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=POSITIONS,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _gpt_neox() -> PreTrainedConfig:
    return GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=POSITIONS, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "opt": _opt,
    "phi3": lambda: Phi3Config(**_SIZES),
    "granite": lambda: GraniteConfig(**_SIZES),
    "gpt_neox": _gpt_neox,
    "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=16, sliding_window=24),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, head_dim=16, sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES, head_dim=16, sliding_window=24, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}  # fmt: skip
"""Configurations of small models by family; gemma and gpt_oss mix full and sliding layers."""


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a family, in evaluation mode.

    Weights are larger than an initialiser's, so that attention differs visibly between tokens.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(4.0)
            if name.endswith("sinks"):
                weight.normal_()
    return model.eval()
