"""Steps of full attention as they come by, and the rotation of their keys."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import PromptError
from penstock.engine.attention_call import AttentionCall
from penstock.evaluate.audit.reference import Counter, forward
from penstock.evaluate.audit.tap import AttentionTap
from penstock.generation.prompts import PromptBatch
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import ModelShape, inspect_model
from penstock.models.plain_model import plain_cache
from penstock.models.prefetch_hooks import can_predict
from penstock.models.query_projection import QueryProjection, decoder_layers

# Takes the rotary embedding off queries and keys, and puts it back on -----------------------------

_STEPS = 8
"""Rounding steps of the model's dtype by which two ways to a query may differ."""


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding whose pairs are the two halves of the leading components."""

    cos: Tensor
    """Of every place of the cache, float32. [batch or 1, tokens, rotated components]"""
    sin: Tensor
    """Like `cos`."""

    def on(self, vectors: Tensor, places: slice = slice(None)) -> Tensor:
        """Rotate.

        Args:
            vectors: pre-RoPE. [batch, heads, tokens, dim]
            places: of the tokens in the cache.

        Returns:
            float32, post-RoPE, of the same shape.
        """
        return _turned(vectors, self.cos[:, places], self.sin[:, places])

    def off(self, vectors: Tensor, places: slice = slice(None)) -> Tensor:
        """Undo `on`; some models scale as well, which is undone too."""
        cos, sin = self.cos[:, places], self.sin[:, places]
        square = cos.square() + sin.square()
        return _turned(vectors, cos / square, -sin / square)

    def row(self, number: int, first: int) -> "Rotation":
        """The rotation of one sequence of the batch, from a place on."""
        number = min(number, len(self.cos) - 1)
        return Rotation(
            self.cos[number : number + 1, first:], self.sin[number : number + 1, first:]
        )


def _turned(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    head = vectors[..., :width].float()
    left, right = head.chunk(2, dim=-1)
    turned = head * cos.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sin.unsqueeze(1)
    return torch.cat([turned, vectors[..., width:].float()], dim=-1)


def find_rotation(
    tables: Sequence[tuple[Tensor, Tensor]], plain: Tensor, rotated: Tensor
) -> Rotation | None:
    """The rotation of a model, if it is of this kind: tried on a query of the newest token.

    Args:
        tables: cos and sin as the model gave them to its layers, pieces in order. Each [batch or 1,
            tokens, components or half of them]
        plain: what the model computes without rotation. [batch, heads, dim]
        rotated: the same with it.

    Returns:
        None where there is no rotary embedding or `off` does not undo it.
    """
    if not tables:
        return None
    cos, sin = (torch.cat([pair[i].float() for pair in tables], dim=1) for i in (0, 1))
    limit = _STEPS * torch.finfo(rotated.dtype).eps * float(plain.abs().max())
    for copies in (1, 2):  # some models keep one half, the other being the same
        rotation = Rotation(torch.cat([cos] * copies, dim=-1), torch.cat([sin] * copies, dim=-1))
        if rotation.cos.shape[-1] > plain.shape[-1] or rotation.cos.shape[-1] % 2:
            continue
        undone = rotation.off(rotated.unsqueeze(2), slice(-1, None)).squeeze(2)
        if (undone - plain.float()).abs().max().item() <= limit:
            return rotation
    return None


# Queries, keys, and queries predicted from below --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """What one layer did in one decode step."""

    query: Tensor
    """Post-RoPE. [batch, num_heads, head_dim]"""
    keys: Tensor
    """Post-RoPE, of all tokens, the new one last. [batch, kv_heads, tokens, head_dim]"""
    scaling: float
    softcap: float | None
    predicted: Tensor | None
    """The query made from the input of the layer before, alike; None where there is no such layer
    of the same kind."""
    input_cosine: Tensor | None
    """Of that input and the layer's own. float64 [batch]"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decode step of full attention."""

    number: int
    fed: Tensor
    """The step's tokens. int64 [batch]"""
    live: Tensor
    """False behind a row's end-of-sequence token. bool [batch]"""
    visible: Tensor
    """False at padding. bool [batch, tokens]"""
    layers: list[LayerStep]
    """Those with full attention."""
    rotation: Rotation | None
    """Of all tokens so far; None where there is none, or none that can be undone."""


def full_attention_steps(
    loaded: LoadedModel, prompt: PromptBatch, *, new_tokens: int, chunk: int,
    ends: frozenset[int], following: Tensor | None = None, on_prefill: Counter = lambda _: None,
) -> Iterator[Step]:  # fmt: skip
    """Read a prompt with the plain model, decode, and hand out step after step.

    A step's tensors are those of the running cache: use them before asking for the next.

    Args:
        new_tokens: most decode steps; fewer when every row has ended.
        chunk: prompt tokens per forward pass.
        ends: tokens after which a row no longer counts.
        following: tokens to feed; None: the likeliest ones. int64 [batch, new_tokens]
        on_prefill: called after every chunk.

    Raises:
        PromptError: the answer ends at once.
        UnsupportedModelError: a tiered cache cannot work with the model.
    """
    model = loaded.model
    shape = inspect_model(model)
    device = model.get_input_embeddings().weight.device
    ids, total = prompt.input_ids.to(device), prompt.padded_tokens
    mask = torch.cat([prompt.attention_mask, torch.ones(len(ids), new_tokens)], dim=1).long()
    mask = mask.to(device)
    cache: Any = plain_cache(model, "dynamic", total + new_tokens)
    alive, done = torch.ones(len(ids), dtype=torch.bool), 0
    watch = _Watch(model, shape, cache)
    with watch.inputs():
        for start in range(0, total, chunk):
            end = min(start + chunk, total)
            log_probs = forward(model, ids[:, start:end], mask[:, :end], cache)
            on_prefill(end)
        with watch.tap.watching(model):
            while done < new_tokens:
                fed = log_probs.argmax(dim=-1) if following is None else following[:, done]
                alive = alive & torch.tensor([token not in ends for token in fed.tolist()])
                if not alive.any():
                    break
                seen = mask[:, : total + done + 1]
                log_probs = forward(model, fed[:, None].to(device), seen, cache)
                yield watch.take(done, fed, alive, seen.bool())
                done += 1
    if not done:
        raise PromptError(
            "the model ends its answer at once, so that there is no step to measure; ask "
            "something, or go on regardless with --past-end"
        )


class _Watch:
    """Sees what goes into the decoder layers and what comes to their attention."""

    def __init__(self, model: CausalLM, shape: ModelShape, cache: Any) -> None:
        self._shape = shape
        self._layers = decoder_layers(model)
        self._projection = QueryProjection(self._layers)
        self._inputs: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self._calls: dict[int, AttentionCall] = {}
        self.tap = AttentionTap(cache, shape, self._calls.__setitem__)
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._rotation: Rotation | None = None

    @contextmanager
    def inputs(self) -> Iterator[None]:
        """Keep every layer's input of the latest single token, and all rotary tables."""
        handles = [
            layer.register_forward_pre_hook(partial(self._see, index), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1:
            extra = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._inputs[index] = (hidden, extra)
        tables = kwargs.get("position_embeddings")
        if index == self._shape.tiered_layers[0] and isinstance(tables, tuple):
            cos, sin = tables
            self._tables.append((cos.float(), sin.float()))

    def take(self, number: int, fed: Tensor, live: Tensor, visible: Tensor) -> Step:
        """The step that was just done.

        Raises:
            UnsupportedModelError: a layer's keys never came to the attention function.
        """
        self.tap.check_all_seen()
        with torch.no_grad():
            if number == 0 or self._rotation is not None:
                self._rotation = self._find_rotation()
            layers = [self._layer(tier) for tier in range(len(self._calls))]
        self._calls.clear()
        return Step(
            number=number,
            fed=fed,
            live=live,
            visible=visible,
            layers=layers,
            rotation=self._rotation,
        )

    def _find_rotation(self) -> Rotation | None:
        """Compare a layer's query with the one that it makes at an angle of zero."""
        if not self._tables:
            return None
        layer = self._shape.tiered_layers[0]
        hidden, kwargs = self._inputs[layer]
        cos, sin = kwargs["position_embeddings"]
        still = {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
        plain = self._projection.probe(layer, hidden, still)[:, :, -1]
        return find_rotation(self._tables, plain, self._calls[0].query[:, :, -1])

    def _layer(self, tier: int) -> LayerStep:
        call, layer = self._calls[tier], self._shape.tiered_layers[tier]
        predicted = likeness = None
        if can_predict(self._shape, layer):
            below, (hidden, kwargs) = self._inputs[layer - 1][0], self._inputs[layer]
            predicted = self._projection.probe(layer, below, kwargs)[:, :, -1]
            left, right = below[:, -1].double(), hidden[:, -1].double()
            likeness = torch.cosine_similarity(left, right, dim=-1)
        return LayerStep(
            query=call.query[:, :, -1], keys=call.keys, scaling=call.scaling,
            softcap=call.softcap, predicted=predicted, input_cosine=likeness,
        )  # fmt: skip
