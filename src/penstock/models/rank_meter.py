"""RankMeter: what a low-rank index of each layer costs by its rank, in nats of what is said."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from penstock.engine.rank_shares import UNIT
from penstock.kernels.key_rotation import KeyTurns
from penstock.models.attention_scaling import attention_scaling
from penstock.models.cache_argument import cache_argument
from penstock.models.last_queries import LastQueries
from penstock.models.latents import joined
from penstock.models.model_shape import inspect_model
from penstock.models.weight_access import model_device

QUERIES = 16
"""Last tokens of a text that are read again with a selection."""
RANKS = (1, 2, 4, 8, 16)
"""Ranks that are measured, as multiples of `UNIT` and up to the basis's own; those between them
cost what lies between, and those above 128 what 128 does."""
LEAST_TOKENS = 512
"""Shorter texts leave nothing to choose."""
GROUP_TOKENS = 4
SELECTED_UNITS = 100
"""Of a selection, as KVSwap's 400 tokens; a sixteenth of a text that is shorter than 6,400."""
SHARE = 16
WINDOW_TOKENS = 64
SINK_TOKENS = 4


class RankMeter:
    """Reads the ends of texts again, with one layer at a time that selects by so few components.

    The KL divergence of what the model says then from what it says with all tokens, mean over the
    last tokens of a text and over the texts, is what that layer costs at that rank. Neither the
    energy of the components nor the error of the heads' outputs tells it: in one layer a fifth of
    the output is noise to all later ones, in another it is the next word of a copy
    (research/notes/2026-11-23-recall-2-two-sittings.md).

    All ranks of a layer are one forward pass, which begins at that layer: copies of the tokens
    stand side by side, at the same positions, and see the past and themselves.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[int], rank: int,
        turns: Sequence[KeyTurns | None] | None = None,
    ) -> None:  # fmt: skip
        """Prepare to measure.

        Args:
            layers: those that an index is made for, by their place in the model.
            rank: components that a layer's basis has.
            turns: what turns each layer's keys before they are projected.
        """
        self._turns = [None] * len(layers) if turns is None else turns
        self._model, self._shape = model, inspect_model(model).kv
        self._scaling = attention_scaling(model, self._shape.head_dim)
        self._layers = tuple(layers)
        self._queries = LastQueries(model)
        self._units = rank // UNIT
        self._ranks = sorted({min(each, self._units) * UNIT for each in RANKS} - {0})
        self._sums = torch.zeros(len(self._layers), len(self._ranks), dtype=torch.float64)
        self._texts = 0

    def tokens_read(self, tokens: int) -> int:
        """How many tokens a text of so many makes the model read again."""
        return QUERIES * len(self._layers) * len(self._ranks) if tokens >= LEAST_TOKENS else 0

    def add(
        self, tokens: Tensor, cache: DynamicCache, bases: Sequence[Tensor],
        progress: Callable[[int], None] = lambda _: None,
        scales: Sequence[Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        """Measure on one text; does nothing where it is short or the cache cannot go back.

        Args:
            tokens: of the text, int64. [tokens]
            cache: of all of them; it comes back as it was.
            bases: of the layers. Each [kv_heads * head_dim, rank]
            progress: called with the number of tokens just read, `tokens_read` in all.
            scales: of the keys that the bases are of, see `LayerAdapter`.
        """
        to_read = self.tokens_read(len(tokens))
        if not to_read or not _can_go_back(self._model, cache):
            progress(to_read)
            return
        cache.crop(-QUERIES)
        decoder = self._queries.layers
        with self._queries.watching(), _outputs(decoder) as outputs:
            true = self._read(tokens[-QUERIES:], cache)
        # All of them first: the cache goes back before the model reads.
        kept = [
            self._selected(*each)
            for each in zip(
                self._layers, [cache] * len(bases), bases, self._turns,
                scales or [None] * len(bases), strict=True,
            )
        ]  # fmt: skip
        copies = len(self._ranks)
        again, below = tokens[-QUERIES:].repeat(copies), _tiled(tuple(outputs), copies)
        cache.crop(-QUERIES)
        for i, layer in enumerate(self._layers):
            with self._side_by_side(kept[i], layer), _given(decoder, below[:layer]):
                said = self._read(again, cache).view(copies, QUERIES, -1)
            self._sums[i] += (true.exp() * (true - said)).sum(-1).mean(-1).double().cpu()
            for cached in cache.layers[layer:]:
                cached.crop(-len(again))
            progress(len(again))
        self._read(tokens[-QUERIES:], cache)
        self._queries.forget()
        self._texts += 1

    def _selected(
        self, layer: int, cache: DynamicCache, basis: Tensor, turns: KeyTurns | None,
        scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """What one layer attends to by each rank. bool [ranks, QUERIES, tokens]"""
        query, cached = self._queries.true(layer, QUERIES)[0], cast(Any, cache.layers[layer])
        keys = joined(self._shape, cached.keys, cached.values)[0][0].float()
        basis = basis.to(query.device)
        if scale is not None:  # keys are scaled and turned in either order
            by_head = scale.to(query.device).view(len(keys), 1, -1)
            keys, grouped = keys * by_head, query.reshape(len(keys), -1, query.shape[2])
            query = (grouped / by_head).view(query.shape)
        chosen = selections(query, keys, basis, self._ranks, turns, scaling=self._scaling)
        return torch.stack([*chosen])

    def _read(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """Log-probabilities behind each of some tokens, copies of the last ones of a text.

        Returns:
            float32 [tokens, vocabulary]
        """
        device, past = model_device(self._model), cache.get_seq_length()
        # A table of positions has none for the copies.
        place = torch.arange(past, past + QUERIES, device=device).repeat(len(tokens) // QUERIES)
        with torch.no_grad():
            logits: Tensor = self._model(
                tokens[None].to(device), position_ids=place[None],
                **cache_argument(self._model, cache), use_cache=True,
            ).logits  # fmt: skip
        return logits[0].float().log_softmax(-1)

    @contextmanager
    def _side_by_side(self, kept: Tensor, chosen: int) -> Iterator[None]:
        """Let all decoder layers read copies of the last tokens, each as if it stood alone.

        Args:
            kept: what the copies see in one layer. bool [copies, QUERIES, tokens]
            chosen: that layer; in all others they see every token before them.
        """
        causal = torch.ones_like(kept).tril(kept.shape[2] - QUERIES)
        masks = {True: _beside(kept), False: _beside(causal)}
        handles = [
            layer.register_forward_pre_hook(
                self._copying(i, len(kept), masks[i == chosen]), with_kwargs=True
            )
            for i, layer in enumerate(self._queries.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _copying(self, i: int, copies: int, seen: Tensor) -> Callable[..., Any]:
        """A hook that gives layer `i` the positions of the last tokens, and a mask."""
        hidden, known = self._queries.inputs(i)
        given = {name: _tiled(known.get(name), copies) for name in _PLACES if name in known}

        def replace(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            now = args[0] if args else kwargs["hidden_states"]
            mask = torch.zeros_like(seen, dtype=now.dtype)
            mask.masked_fill_(~seen, torch.finfo(now.dtype).min)
            # A model may add positions of its own to the first layer's input.
            first = _tiled(hidden, copies) if i == 0 else now
            args = (first, *args[1:]) if args else args
            more = {} if args else {"hidden_states": first}
            return args, {**kwargs, **given, **more, "attention_mask": mask[None, None]}

        return replace

    def costs(self) -> tuple[tuple[float, ...], ...]:
        """Mean over the texts, nats a token. [layers, rank // UNIT]; nothing without a text."""
        if not self._texts or not self._ranks:
            return ()
        every = UNIT * np.arange(1, self._units + 1)
        means = (self._sums / self._texts).numpy()
        return tuple(tuple(np.interp(every, self._ranks, row).tolist()) for row in means)


_PLACES = ("position_ids", "position_embeddings")
"""What tells a layer where its tokens stand; [..., tokens] or pairs of [..., tokens, width]."""


def _tiled(value: Any, copies: int) -> Any:
    """Something of each token, for copies of all of them side by side."""
    if isinstance(value, tuple):
        return tuple(_tiled(each, copies) for each in value)
    if not isinstance(value, Tensor):
        return value
    at = -1 if not value.is_floating_point() else -2
    return torch.cat([value] * copies, dim=at)


def _beside(kept: Tensor) -> Tensor:
    """What copies see of the past and of themselves, from what one sees of a text.

    Args:
        kept: bool [copies, QUERIES, tokens]

    Returns:
        Copies do not see each other. bool [copies * QUERIES, tokens + (copies - 1) * QUERIES]
    """
    own = torch.zeros(len(kept), QUERIES, len(kept), QUERIES, dtype=torch.bool, device=kept.device)
    for i, each in enumerate(kept):
        own[i, :, i] = each[:, -QUERIES:]
    return torch.cat([kept[:, :, :-QUERIES].flatten(0, 1), own.flatten(2).flatten(0, 1)], dim=1)


def selections(
    query: Tensor, keys: Tensor, basis: Tensor, ranks: Sequence[int],
    turns: KeyTurns | None = None, *, scaling: float | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Which tokens KVSwap would attend to with the first components of a basis.

    Args:
        query: post-RoPE, of the text's last tokens, float32. [heads, queries, head_dim]
        keys: post-RoPE, of all its tokens, float32. [kv_heads, tokens, head_dim]
        basis: [kv_heads * head_dim, rank]
        ranks: ascending.
        turns: what turns keys before they are projected.
        scaling: factor on the logits; None: 1 / sqrt(head_dim).

    Yields:
        For each rank, the best units by softmax shares, window and sinks. bool [queries, tokens]
    """
    heads, count, dim = query.shape
    factor = dim**-0.5 if scaling is None else scaling
    kv_heads, tokens, _ = keys.shape
    place = torch.arange(tokens, device=keys.device)
    now = torch.arange(tokens - count, tokens, device=keys.device)[:, None]
    later = place > now
    units = tokens // GROUP_TOKENS
    whole = units * GROUP_TOKENS
    selected = max(1, min(SELECTED_UNITS, units // SHARE))
    always = ((place > now - WINDOW_TOKENS) | (place < SINK_TOKENS) | (place >= whole)) & ~later
    by_token = keys.transpose(0, 1)[None, :whole]
    if turns is not None:
        by_token = turns.keys(by_token, 0)
    components = by_token[0].flatten(1) @ basis
    grouped = query.reshape(kv_heads, -1, dim)
    logits = torch.zeros(heads * count, whole, device=keys.device)
    before = 0
    for rank in ranks:
        part = slice(before, rank)
        rebuilt = (components[:, part] @ basis[:, part].T).view(1, whole, kv_heads, dim)
        if turns is not None:
            rebuilt = turns.keys_of(rebuilt)
        logits += (grouped @ rebuilt[0].permute(1, 2, 0)).flatten(0, 1) * factor
        before = rank
        seen = logits.view(heads, count, whole).masked_fill(later[:, :whole], float("-inf"))
        shares = seen.view(heads, count, units, GROUP_TOKENS).amax(-1).softmax(-1).sum(0)
        best = shares.topk(selected, dim=-1).indices
        chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, best, True)
        kept = always.clone()
        kept[:, :whole] |= chosen.repeat_interleave(GROUP_TOKENS, dim=1) & ~later[:, :whole]
        yield kept


def _can_go_back(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether the last tokens can be read again, with a mask of ours."""
    fixed = ("is_sliding", "recurrent_states")
    slides = any(getattr(layer, name, False) for layer in cache.layers for name in fixed)
    return not slides and model.config._attn_implementation in ("sdpa", "eager")


@contextmanager
def _outputs(layers: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """What decoder layers return, in the order in which they are called."""
    found: list[Any] = []
    handles = [layer.register_forward_hook(lambda *call: found.append(call[2])) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _given(layers: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Let the first layers return these instead of computing them; their cache stays as it is.

    Layers below the one with a selection see what they saw before.
    """
    skipped = layers[: len(outputs)]
    own = [layer.__dict__.get("forward") for layer in skipped]  # accelerate's, if any
    try:
        for layer, output in zip(skipped, outputs, strict=True):
            layer.forward = lambda *_, output=output, **__: output
        yield
    finally:
        for layer, forward in zip(skipped, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
