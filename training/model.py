"""The model in training: transformers' own Qwen3 holds the parameters, a faster forward uses them.

`hidden_states` does what `Qwen3ForCausalLM.forward` does, for rows of one length without padding
in front: everything but attention runs on `[rows * tokens, ...]`, in two functions per layer that
torch.compile makes into few kernels, once for all lengths. `difference` measures both forwards
against each other; the training checks it when it starts.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.settings import Architecture, Attention

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
_RMS_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Pieces:
    """The two functions around a layer's attention, compiled or not."""

    before: Callable[..., Any]
    after: Callable[..., Any]

    @classmethod
    def plain(cls) -> "Pieces":
        """As they are written."""
        return cls(before_attention, after_attention)

    @classmethod
    def compiled(cls) -> "Pieces":
        """Through torch.compile, for one number of tokens a batch."""
        return cls(
            torch.compile(before_attention, dynamic=False),
            torch.compile(after_attention, dynamic=False),
        )


def build(architecture: Architecture, vocabulary_size: int, seed: int) -> Qwen3ForCausalLM:
    """A model with random weights, float32, on the CPU: normal with `init_std`, norms at one."""
    config = Qwen3Config(
        vocab_size=vocabulary_size, hidden_size=architecture.hidden,
        intermediate_size=architecture.feed_forward, num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads, num_key_value_heads=architecture.kv_heads,
        head_dim=architecture.head_dim, max_position_embeddings=architecture.positions,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        rms_norm_eps=_RMS_EPS, tie_word_embeddings=True, attention_bias=False,
        max_window_layers=architecture.layers, initializer_range=architecture.init_std,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, architecture.init_std, generator=draw)
            else:
                parameter.fill_(1.0)
    return model


def hidden_states(
    model: Qwen3ForCausalLM, tokens: Tensor, positions: Tensor, pieces: Pieces, dtype: torch.dtype
) -> Tensor:
    """What stands behind the last norm, row by row.

    Args:
        model: holds the parameters, float32.
        tokens: int. [rows, tokens]
        positions: int, rising in every row. [rows, tokens]
        pieces: how the layers are computed.
        dtype: of activations; parameters are rounded to it where they are used.

    Returns:
        [rows * tokens, hidden], `dtype`.
    """
    inner: Any = model.model
    x = functional.embedding(tokens.reshape(-1), inner.embed_tokens.weight).to(dtype)
    cos, sin = _rotation(positions.reshape(-1), model.config, dtype)
    return through_layers(inner, x, cos, sin, len(tokens), pieces)


def through_layers(
    decoder: Any, x: Tensor, cos: Tensor, sin: Tensor, rows: int, pieces: Pieces
) -> Tensor:
    """What stands behind the last norm of a decoder of Qwen3's kind.

    Args:
        decoder: transformers' module with the layers and the norm.
        x: embeddings. [rows * tokens, hidden]
        cos: see `turns`.
        sin: see `turns`.
        rows: of the batch.
        pieces: how the layers are computed.

    Returns:
        [rows * tokens, hidden], as `x`.
    """
    config: Any = decoder.config
    shape = (rows, len(x) // rows, config.num_attention_heads, config.head_dim)
    for layer in decoder.layers:
        attn, mlp = layer.self_attn, layer.mlp
        q, k, v = pieces.before(
            x, cos, sin, layer.input_layernorm.weight, attn.q_proj.weight, attn.k_proj.weight,
            attn.v_proj.weight, attn.q_norm.weight, attn.k_norm.weight,
        )  # fmt: skip
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = pieces.after(
            x, mixed.transpose(1, 2).reshape(len(x), -1), attn.o_proj.weight,
            layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight,
            mlp.down_proj.weight,
        )  # fmt: skip
    return _rms_norm(x, decoder.norm.weight)


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, q_weight: Tensor, k_weight: Tensor,
    v_weight: Tensor, q_norm: Tensor, k_norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values of a layer; [tokens, heads, head_dim] each.

    Keys and values are repeated for all heads that share them: not every attention backend
    takes fewer of them, and which do changes with torch's releases.
    """
    h = _rms_norm(x, norm)
    shape = (len(x), -1, len(q_norm))
    q, k, v = (_linear(h, weight).view(shape) for weight in (q_weight, k_weight, v_weight))
    q = _rotated(_rms_norm(q, q_norm), cos, sin)
    k = _rotated(_rms_norm(k, k_norm), cos, sin)
    shared = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)


def after_attention(
    x: Tensor, mixed: Tensor, o_weight: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """The rest of a layer; [tokens, hidden]."""
    x = x + _linear(mixed, o_weight)
    h = _rms_norm(x, norm)
    return x + _linear(functional.silu(_linear(h, gate)) * _linear(h, up), down)


def guess_losses(
    model: Qwen3ForCausalLM, hidden: Tensor, places: Tensor, targets: Tensor
) -> Tensor:
    """Cross entropy of each guess, float32. [guesses]

    Args:
        model: its embedding gives the logits.
        hidden: of `hidden_states`.
        places: rows of `hidden` that guess. [guesses]
        targets: what is right there. [guesses]
    """
    return functional.cross_entropy(guess_logits(model, hidden, places), targets, reduction="none")


def guess_logits(model: Qwen3ForCausalLM, hidden: Tensor, places: Tensor) -> Tensor:
    """Logits at some places, float32. [guesses, vocabulary]

    Args:
        model: its embedding gives the logits.
        hidden: of `hidden_states`.
        places: rows of `hidden`, each at most once and rising. [guesses]
    """
    embedding: Any = model.get_input_embeddings()
    if len(places) < len(hidden):  # else they are all
        hidden = hidden.index_select(0, places)
    return _linear(hidden, embedding.weight).float()


def working_backend(wanted: Attention, device: torch.device, head_dim: int) -> Attention:
    """`wanted`, or "auto" where that backend cannot do what training needs of it."""
    if wanted == "auto":
        return wanted
    qkv = torch.zeros(3, 1, 2, 128, head_dim, device=device, dtype=torch.bfloat16)
    try:
        with sdpa_kernel(_BACKENDS[wanted]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says at length why it cannot
            q, k, v = qkv.requires_grad_().unbind()
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed.sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return "auto"
    return wanted


@contextlib.contextmanager
def attention_backend(first: Attention) -> Iterator[None]:
    """Try one backend of scaled_dot_product_attention before the others; "auto": torch's order."""
    if first == "auto":
        yield
        return
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    order = [_BACKENDS[first], *(one for one in others if one != _BACKENDS[first])]
    with sdpa_kernel(order, set_priority=True):
        yield


@torch.no_grad()
def difference(
    model: Qwen3ForCausalLM, tokens: Tensor, pieces: Pieces, dtype: torch.dtype
) -> float:
    """How far our logits are from those of transformers: the most, as a share of their range.

    Args:
        tokens: int. [rows, tokens]
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    hidden = hidden_states(model, tokens, positions, pieces, dtype)
    everywhere = torch.arange(tokens.numel(), device=tokens.device)
    ours = guess_logits(model, hidden, everywhere)
    theirs = model(input_ids=tokens.long(), use_cache=False).logits.float().flatten(0, 1)
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


def _rotation(positions: Tensor, config: Qwen3Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding; [tokens, 1, head_dim] each."""
    return turns(positions.float()[:, None] * inverse_frequencies(config, positions.device), dtype)


def inverse_frequencies(config: Any, device: torch.device) -> Tensor:
    """Radians a position, of each pair of components; float32 [head_dim / 2]"""
    theta = float(config.rope_parameters["rope_theta"])
    even = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    inverse: Tensor = 1.0 / theta ** (even / config.head_dim)
    return inverse


def turns(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines that `Pieces` take, from angles [tokens, head_dim / 2]; [tokens, 1,
    head_dim] each."""
    both = torch.cat((angles, angles), dim=-1)[:, None, :]
    return both.cos().to(dtype), both.sin().to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _RMS_EPS)
    return weight.to(x.dtype) * (wide * scale).to(x.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight.to(x.dtype))
