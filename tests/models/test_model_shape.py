"""What a model's cache looks like, and the reason why some models cannot have a tiered one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    CodeGenConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3nTextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from penstock import KVSwap, TieredCache
from penstock.core.errors import UnsupportedModelError
from penstock.methods import Quest
from penstock.models.beam_decoder import make_decoder
from penstock.models.cache_argument import cache_argument
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_models import POSITIONS, tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _deepseek() -> PreTrainedConfig:
    return DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, first_k_dense_replace=2, n_group=1, topk_group=1, index_topk=4,
    )  # fmt: skip


def _gemma3n() -> PreTrainedConfig:
    return Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4}, head_dim=8, num_kv_shared_layers=2, sliding_window=16,
        vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "mamba": (
        lambda: MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2),
        "no layer of .* attends to keys and values|no attention heads|state-space",
    ),
    "bloom": (
        lambda: BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "attention interface",
    ),
    "falcon": (
        lambda: FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
        ),
        "attention interface",
    ),
    "an indexer": (_deepseek, r"indexer of its own \(DSA\)"),
    "sliding mistral": (
        lambda: MistralConfig(**SIZES, sliding_window=16),
        "every layer .* sliding window, so that its cache is bounded already",
    ),
    "phi3": (
        lambda: Phi3Config(**SIZES, sliding_window=64, pad_token_id=0, eos_token_id=2),
        r"of 64 tokens, but it has 64 positions.*: set model\.config\.sliding_window = None",
    ),
    "gemma3n": (_gemma3n, "shares keys and values between layers"),
    "bart": (
        lambda: BartConfig(
            vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
            decoder_ffn_dim=32, encoder_attention_heads=4, decoder_attention_heads=4,
            is_encoder_decoder=True,
        ),
        "encoder-decoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    make, reason = REFUSED[name]
    config = make()
    if name == "bart":
        model = BartForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        TieredCache(model, "kvswap", store="memory", max_tokens=32)
    assert type(model).__name__ in str(caught.value)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_codegen_is_exact_or_refused() -> None:
    """It goes through the attention interface since transformers 5.24."""
    torch.manual_seed(0)
    config = CodeGenConfig(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=256, rotary_dim=4,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    if not model._can_set_attn_implementation():
        with pytest.raises(UnsupportedModelError, match="attention interface"):
            inspect_model(model)
        return
    ids = torch.randint(3, 64, (1, 120))
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False,
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    expected = model.generate(ids, **asked)
    everything: dict[str, Any] = {"selected_tokens": 200, "window_tokens": 8}
    for policy, exact in ((KVSwap(), True), (Quest(**everything), False)):
        with TieredCache(
            model, policy, store="memory", max_tokens=160, exact=exact, must_tier=True
        ) as cache:
            found = model.generate(ids, **cache_argument(model, cache), **asked)
            assert cache.stats.decode.tokens == 19
        assert torch.equal(found, expected)


def test_longrope_within_its_original_positions_alone() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "factor": 4.0,
        "long_factor": [4.0, 5.0, 6.0, 7.0], "original_max_position_embeddings": 64,
    }  # fmt: skip
    sizes = {**SIZES, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    config = Phi3Config(**sizes, rope_parameters=rope, pad_token_id=0, eos_token_id=2)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 63)[None]
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 99}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    with TieredCache(model, "full", store="memory", max_tokens=64) as cache:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), **cache_argument(model, cache), **asked
        )
        assert cache.stats.decode.tokens == 3
    assert torch.equal(found, expected)
    for refused in (
        lambda: TieredCache(model, "full", store="memory", max_tokens=65),
        lambda: TieredCache(model, "full", store="memory"),
        lambda: make_decoder(model, beams=2, width=1, max_tokens=65),
    ):
        with pytest.raises(UnsupportedModelError, match=r"up to 64 tokens .* work, not of \d+"):
            refused()


def test_t5() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"T5.* encoder-decoder"):
        inspect_model(T5ForConditionalGeneration(config))


def test_odd_dtypes() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to(torch.float64)
    with pytest.raises(UnsupportedModelError, match="float64"):
        inspect_model(model)


@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim", "tiered", "windows"),
    [
        ("llama", 2, 12, (0, 1, 2), {}),
        ("qwen3", 2, 16, (0, 1, 2), {}),
        ("opt", 4, 12, (0, 1, 2), {}),
        ("gemma2", 2, 16, (1,), {0: 24, 2: 24}),
        ("gemma3", 2, 16, (1, 2), {0: 24}),
        ("gpt_oss", 2, 16, (0, 2), {1: 24}),
    ],
)
def test_shapes(
    family: str, kv_heads: int, head_dim: int, tiered: tuple[int, ...], windows: dict[int, int]
) -> None:
    shape = inspect_model(tiny_model(family))
    assert (shape.kv.num_kv_heads, shape.kv.head_dim) == (kv_heads, head_dim)
    assert shape.kv.num_query_heads == 4
    assert shape.kv.num_layers == len(tiered)
    assert shape.tiered_layers == tiered
    assert shape.windows == windows
    assert shape.max_positions == POSITIONS
