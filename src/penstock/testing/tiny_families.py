"""tiny_family(): a small random model of any decoder family that transformers has."""

import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 160
LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 24,
    "attention_chunk_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # Other names of the same.
    "d_model": 64, "n_embd": 64, "n_embed": 64, "dim": 64, "n_layer": LAYERS, "n_layers": LAYERS,
    "num_layers": LAYERS, "n_head": 4, "n_heads": 4, "num_heads": 4, "n_positions": 512,
    "n_ctx": 512, "n_inner": 64, "d_ff": 64, "ffn_dim": 64, "ffn_hidden_size": 64,
    "decoder_layers": LAYERS, "encoder_layers": LAYERS, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "max_seq_len": 512, "max_sequence_length": 512, "max_target_positions": 512,
    "d_inner": 128, "d_embed": 64, "embedding_size": 64, "word_embed_proj_dim": 64,
    "rotary_dim": 8, "attention_head_dim": 16, "rotary_value": False, "max_position_embedding": 512,
    # Mixtures of experts.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_num_shared_experts": 1,
    "shared_intermediate_size": 32, "intermediate_size_mlp": 64, "zero_expert_num": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": 3, "num_dense_layers": 1,
    # Latent attention.
    "kv_lora_rank": 16, "q_lora_rank": 16, "o_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "qk_head_dim": 24, "v_head_dim": 16, "index_head_dim": 16,
    "index_n_heads": 2, "index_topk": 16,
    # Recurrent layers.
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_d_ssm": 128,
    "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_dt_rank": 4, "n_mamba_heads": 2,
    "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 16, "time_step_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "lru_width": 64, "n_groups": 1, "attention_hidden_size": 64,
    "linear_head_dim": 16, "linear_num_heads": 4, "qk_dim_factor": 0.5, "mamba_chunk_size": 16,
    "block_ff_dim": 64,
    # Embeddings of each layer, vision and sound.
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "num_kv_shared_layers": 0, "altup_num_inputs": 2, "image_size": 28, "patch_size": 14,
    "depth": 2, "num_local_heads": 4, "conv_dim": 64, "projection_dim": 64,
    "attn_types": None,
}  # fmt: skip
"""What each field of a configuration is made, where a family has it."""

_UNSAID = ("head_dim", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group",
           "topk_group", "num_key_value_heads")  # fmt: skip
"""Fields that are set also where a family's default is None."""

_SPECIAL: dict[str, dict[str, Any]] = {
    "bart": {"is_encoder_decoder": False},
    "bigbird_pegasus": {"is_encoder_decoder": False, "attention_type": "original_full"},
    "blenderbot": {"is_encoder_decoder": False},
    "blenderbot-small": {"is_encoder_decoder": False},
    "marian": {"is_encoder_decoder": False},
    "mbart": {"is_encoder_decoder": False},
    "mvp": {"is_encoder_decoder": False},
    "pegasus": {"is_encoder_decoder": False},
    "plbart": {"is_encoder_decoder": False},
    "whisper": {"is_encoder_decoder": False},
    "bailing_hybrid": {"head_dim": 8, "num_expert_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 2]},
    "cpmant": {"dim_head": 16, "dim_ff": 64, "prompt_length": 4, "prompt_types": 4},
    "ctrl": {"dff": 64},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "attention", "mamba"]},
    "hrm_text": {"H_layers": 2, "L_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "moshi": {"sliding_window": 512},
    "reformer": {
        "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32], "feed_forward_size": 64,
        "attn_layers": ["local", "local", "local", "local"], "local_attn_chunk_length": 16,
    },
    "roc_bert": {"shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY},
    "xlm": {"n_words": VOCABULARY, "emb_dim": 64},
    "xmod": {"default_language": "en_XX", "adapter_reduction_factor": 2},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_hidden_size": 128,
        "attention_head_dim": 32, "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_hidden_size": 128,
        "attention_head_dim": 32, "num_key_value_heads": 4, "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Of single families: fields that must be otherwise."""

_MOST_WEIGHTS = 5_000_000


def decoder_families() -> tuple[str, ...]:
    """The model types of transformers that have a causal language model, in order of name."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(family: str) -> PreTrainedConfig:
    """A configuration of a family with small sizes, four layers, and where it mixes them,
    layers of both kinds, two full ones in a row."""
    return _with_tiny_sizes(CONFIG_MAPPING[family], _SPECIAL.get(family, {}))


def _with_tiny_sizes(kind: Any, special: dict[str, Any]) -> PreTrainedConfig:
    config = kind()
    given = config.to_dict()
    sizes = {name: value for name, value in _SIZES.items() if _takes(config, given, name)}
    if getattr(config, "layer_types", None) is None and "sliding_window" in sizes:
        sizes["sliding_window"] = None  # one window for all layers: have none
    kinds = list(getattr(config, "layer_types", None) or ())
    settable = not isinstance(getattr(kind, "layer_types", None), property)
    if kinds and settable and "layer_types" not in getattr(config, "attribute_map", {}):
        sizes["layer_types"] = _mixed(kinds)
    for name, nested in vars(config).items():
        if isinstance(nested, PreTrainedConfig):
            sizes[name] = _with_tiny_sizes(type(nested), special.get(name, {})).to_dict()
    if "qk_rope_head_dim" in given and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return kind(**(sizes | special))


def _takes(config: Any, given: dict[str, Any], name: str) -> bool:
    if name in getattr(config, "attribute_map", {}) or name not in given:
        return False
    is_latent = "qk_rope_head_dim" in given
    if name == "head_dim" and is_latent:
        return False
    return given[name] is not None or name.endswith("_token_id") or name in _UNSAID


def _mixed(kinds: list[str]) -> list[str]:
    full = "full_attention"
    others = [kind for kind in dict.fromkeys(kinds) if kind != full]
    if full not in kinds:
        return (others * LAYERS)[:LAYERS]
    if not others:
        return [full] * LAYERS
    return [others[0], full, full, others[-1]]


def tiny_family(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a family, in evaluation mode.

    Weights are larger than an initialiser's, so that attention differs visibly between tokens.
    """
    config: Any = tiny_config(family)
    decoder = config.get_text_config(decoder=True)
    for each in (config, decoder):
        if hasattr(each, "is_decoder") and hasattr(type(each), "is_decoder"):
            each.is_decoder = True
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            count = sum(w.numel() for w in AutoModelForCausalLM.from_config(config).parameters())
        if count > _MOST_WEIGHTS:
            raise ValueError(f"{family} has {count:,} weights: some size has another name")
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and weight.numel():
                weight.normal_(0.0, 0.08, generator=draw)
            elif name.endswith("sinks"):
                weight.normal_(generator=draw)
    return model.eval()
