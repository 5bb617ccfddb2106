"""Keys and queries that full attention makes of a text: what every index of the study is asked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import PromptError, UnsupportedModelError
from penstock.engine.attention_call import AttentionCall
from penstock.engine.policy import Rotary
from penstock.evaluate.audit.tap import AttentionTap
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import plain_cache
from penstock.models.rotary import rotary_of

ASKED = 48
"""Queries that look for keys: those of the tokens behind the prompt."""
KEPT = 256
"""Queries of the prompt that a basis may be chosen by, evenly apart."""
CHUNK_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What the tiered layers made of one text."""

    keys: list[Tensor]
    """Post-RoPE, of the prompt, by layer. float32 [kv_heads, tokens, head_dim]"""
    asked: list[Tensor]
    """Post-RoPE queries of the tokens behind it. float32 [heads, ASKED, head_dim]"""
    kept: list[Tensor]
    """Post-RoPE queries of the prompt. float32 [heads, at most KEPT, head_dim]"""
    places: Tensor
    """Positions of `kept`. int64"""
    scaling: float

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.keys[0].shape[1])


def rotary_by_halves(loaded: LoadedModel) -> Rotary:
    """The model's rotary embedding.

    Raises:
        UnsupportedModelError: it has none that turns component i with component i + half.
    """
    rotary = rotary_of(loaded.model)
    if rotary is None:
        raise UnsupportedModelError(
            f"{loaded.name} has no rotary embedding like Llama's, which the study turns keys by"
        )
    return rotary


def record(
    loaded: LoadedModel, ids: list[int], on_tokens: Callable[[int], None] = lambda _: None
) -> Recording:
    """Read a text with full attention; its last `ASKED` tokens are those that ask.

    Args:
        on_tokens: called with the tokens read so far.

    Raises:
        PromptError: the text does not fit the model's positions.
        UnsupportedModelError: a layer's keys never come to the attention function.
    """
    model, total = loaded.model, len(ids)
    shape = inspect_model(model)
    if total > shape.max_positions:
        raise PromptError(
            f"{total:,} tokens do not fit {loaded.name}, which has {shape.max_positions:,} "
            "positions; ask for fewer --tokens"
        )
    prompt = total - ASKED
    places = torch.linspace(0, prompt - 1, min(KEPT, prompt)).long()
    device = model.get_input_embeddings().weight.device
    cache: Any = plain_cache(model, "dynamic", total)
    layers = shape.tiered_layers
    asked: list[list[Tensor]] = [[] for _ in layers]
    kept: list[list[Tensor]] = [[] for _ in layers]
    scaling, start = 1.0, 0

    def see(number: int, call: AttentionCall) -> None:
        nonlocal scaling
        scaling, end = call.scaling, start + call.query.shape[2]
        inside = places[(places >= start) & (places < end)] - start
        query = call.query[0].float().cpu()
        kept[number].append(query[:, inside])
        asked[number].append(query[:, max(0, prompt - start) :])

    tap = AttentionTap(cache, shape, see)
    decoder: Any = model
    text = torch.tensor([ids], device=device)
    with torch.no_grad(), tap.watching(model):
        while start < total:
            part = text[:, start : start + CHUNK_TOKENS]
            decoder(part, **cache_argument(decoder, cache), use_cache=True, logits_to_keep=1)
            start += part.shape[1]
            on_tokens(start)
    tap.check_all_seen()
    return Recording(
        keys=[cache.layers[layer].keys[0, :, :prompt].float().cpu() for layer in layers],
        asked=[torch.cat(parts, dim=1) for parts in asked],
        kept=[torch.cat(parts, dim=1) for parts in kept], places=places, scaling=scaling,
    )  # fmt: skip
