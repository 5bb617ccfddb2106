"""Keys and queries of a whole text, layer by layer: what clusters are made of and asked with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import PromptError, UnsupportedModelError
from penstock.engine.attention_call import AttentionCall, AttentionSum
from penstock.models.attention_adapter import Attachment, mark_keys
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import plain_cache

Counter = Callable[[int], None]
"""Called with the tokens done so far."""


@dataclass(frozen=True, kw_only=True)
class KeyStream:
    """What full attention's tiered layers made of a prompt and the output behind it."""

    prompt_tokens: int
    keys: list[Tensor]
    """Post-RoPE, of all tokens, by layer. float32 [kv_heads, tokens, head_dim]"""
    queries: list[Tensor]
    """Post-RoPE, of all tokens, by layer. float32 [num_heads, tokens, head_dim]"""
    scaling: list[float]
    """Factor on the logits, by layer."""
    layers: tuple[int, ...]
    """Numbers of those layers in the model."""
    expected: float
    """Share of the output's tokens that the model would have said itself at their place."""

    @property
    def output_tokens(self) -> int:
        """Tokens behind the prompt."""
        return int(self.keys[0].shape[1]) - self.prompt_tokens

    def only(self, layers: Sequence[int]) -> "KeyStream":
        """Some of the layers, by their place in `keys`."""
        return replace(
            self, keys=[self.keys[layer] for layer in layers],
            queries=[self.queries[layer] for layer in layers],
            scaling=[self.scaling[layer] for layer in layers],
            layers=tuple(self.layers[layer] for layer in layers),
        )  # fmt: skip

    def grouped_queries(self, layer: int) -> Tensor:
        """A layer's queries by KV head. [kv_heads, heads of each, tokens, head_dim]"""
        queries = self.queries[layer]
        return queries.view(len(self.keys[layer]), -1, *queries.shape[1:])


def record_keys(
    loaded: LoadedModel, ids: list[int], prompt_tokens: int, *, chunk: int,
    on_chunk: Counter = lambda _: None,
) -> KeyStream:  # fmt: skip
    """Read a text with full attention and keep every layer's keys and queries.

    Args:
        ids: prompt and output.
        prompt_tokens: how many of them are the prompt.
        chunk: tokens per forward pass.

    Raises:
        PromptError: there is no output, or the text does not fit the model's positions.
        UnsupportedModelError: a layer's keys never come to the attention function.
    """
    model = loaded.model
    shape = inspect_model(model)
    if len(ids) <= prompt_tokens or prompt_tokens < 2:
        raise PromptError(f"{len(ids)} tokens hold no prompt of {prompt_tokens} and an output")
    if len(ids) > shape.max_positions:
        raise PromptError(
            f"{len(ids):,} tokens do not fit {loaded.name}, which has {shape.max_positions:,} "
            "positions; ask for a shorter --max-new-tokens"
        )
    device = model.get_input_embeddings().weight.device
    cache: Any = plain_cache(model, "dynamic", len(ids))
    kept = _Kept(cache, shape.tiered_layers)
    text, said = torch.tensor([ids], device=device), list[Tensor]()
    decoder: Any = model
    with torch.no_grad(), kept.watching(model):
        for start in range(0, len(ids), chunk):
            part = text[:, start : start + chunk]
            out = decoder(part, **cache_argument(decoder, cache), use_cache=True)
            said.append(out.logits[0].argmax(dim=-1).cpu())
            on_chunk(start + part.shape[1])
    kept.check()
    guessed = torch.cat(said)[prompt_tokens - 1 : -1]
    right = guessed == torch.tensor(ids[prompt_tokens:])
    keys = [cache.layers[layer].keys[0].float().cpu() for layer in shape.tiered_layers]
    return KeyStream(
        prompt_tokens=prompt_tokens, keys=keys,
        queries=[torch.cat(parts, dim=1) for parts in kept.queries], scaling=kept.scaling,
        layers=shape.tiered_layers, expected=float(right.float().mean()),
    )  # fmt: skip


class _Kept:
    """Full attention over a plain cache in chunks, and the queries that came by."""

    def __init__(self, cache: Any, layers: tuple[int, ...]) -> None:
        self._held = [cache.layers[index] for index in layers]
        self.queries: list[list[Tensor]] = [[] for _ in layers]
        self.scaling = [0.0 for _ in layers]

    @contextmanager
    def watching(self, model: CausalLM) -> Iterator[None]:
        """Put the layers' attention through this object."""
        attachment = Attachment(model)
        for number, layer in enumerate(self._held):
            layer.update = self._marking(layer.update, number)
        try:
            yield
        finally:
            attachment.detach()
            for layer in self._held:
                del layer.update

    def _attend(self, number: int, call: AttentionCall) -> Tensor:
        """The past without a mask, the new tokens with a causal one."""
        self.queries[number].append(call.query[0].float().cpu())
        self.scaling[number] = call.scaling
        past = call.keys.shape[2] - call.query.shape[2]
        total = AttentionSum(call)
        if past:
            total.add(call.keys[:, :, :past], call.values[:, :, :past], None)
        total.add(call.keys[:, :, past:], call.values[:, :, past:], None, causal=True)
        return total.result()

    def check(self) -> None:
        """Every layer's keys must have come to the attention function.

        Raises:
            UnsupportedModelError: they did not.
        """
        if not all(self.queries):
            raise UnsupportedModelError(
                "the attention function never received the keys of the cache: this model "
                "transforms them in between"
            )

    def _marking(self, update: Callable[..., tuple[Tensor, Tensor]], number: int) -> Any:
        def marking(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = update(*args, **kwargs)
            mark_keys(keys, partial(self._attend, number))
            return keys, values

        return marking
