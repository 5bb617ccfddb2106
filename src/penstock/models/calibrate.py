"""Calibration: fit a model's low-rank adapter on text, and see which queries can be predicted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import ConfigError, PromptError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LayerAdapter, LowRankAdapter, fit_basis
from penstock.engine.key_scale import key_scale, mean_squares
from penstock.kernels.key_rotation import BLOCK_TOKENS, KeyTurns
from penstock.models.cache_argument import cache_argument
from penstock.models.fingerprint import fingerprint
from penstock.models.key_rotations import key_rotations
from penstock.models.last_queries import LastQueries
from penstock.models.latents import joined
from penstock.models.model_shape import ModelShape, inspect_model
from penstock.models.own_cache import dynamic_cache
from penstock.models.prefetch_hooks import can_predict
from penstock.models.rank_meter import RankMeter
from penstock.models.weight_access import model_device

DEFAULT_RANK = 128
DEFAULT_WINDOW_TOKENS = 8192
CHUNK_TOKENS = 1024
KEPT_TOKENS = 16_384
"""Tokens whose keys are kept until the bases are known, windows together; one window at least."""
COSINE_TOKENS = 64
"""Tokens of each text on which the query prediction is judged, and that say how loud queries are.
"""


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    rank: int | None = None,
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    path: str | Path | None = None,
    block_tokens: int = BLOCK_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> LowRankAdapter:
    """Fit an adapter by SVD of the post-RoPE keys of calibration text (KVSwap 3.2, A.1).

    One pass over the text. The range of the projected components and what each layer needs of them
    (`RankMeter`, at the ends of windows; not in the paper) are measured on windows whose keys were
    kept, `KEPT_TOKENS` in all. Give varied text. Keys are turned back to their offset in a block,
    where the model's rotary embedding is known (`KeyTurns`), and scaled by what queries see
    (`key_scale`; neither is in the paper); elsewhere give windows as long as the prompts to come.

    Args:
        model: the model, on any device.
        texts: token ids of separate documents, int64. Each [tokens]
        rank: components to keep; default 128, or the whole width if that is less.
        window_tokens: longest piece of a text that is read at once; never more than the model has
            positions.
        path: where to save the adapter, if anywhere.
        block_tokens: of a block, for policies that have the same `index_block_tokens`; 0: keys as
            the model has them, as in the paper.
        progress: called with (tokens done, tokens in all), those that are read again among them.

    Returns:
        The adapter, with the model's fingerprint.

    Raises:
        ConfigError: the rank or the window is not possible.
        PromptError: there is no text.
    """
    shape = inspect_model(model)
    rank = min(DEFAULT_RANK, shape.kv.joint_dim) if rank is None else rank
    if not 1 <= rank <= shape.kv.joint_dim:
        raise ConfigError(f"rank={rank} must be between 1 and {shape.kv.joint_dim}")
    windows = _windows(texts, window_tokens, shape)
    turns = _turns(model, shape, block_tokens, max(map(len, windows)))
    ranks = RankMeter(model, shape.tiered_layers, rank, turns)
    read, kept = sum(map(len, windows)), _kept_windows([len(piece) for piece in windows])
    report = _sums(progress, read + sum(ranks.tokens_read(len(windows[i])) for i in kept))
    moments = [torch.zeros(shape.kv.joint_dim, shape.kv.joint_dim) for _ in shape.tiered_layers]
    squares = torch.zeros(len(moments), shape.kv.num_kv_heads, shape.kv.head_dim)
    queries, cosines = LastQueries(model), _CosineMeter(shape)
    held: list[tuple[Tensor, DynamicCache]] = []
    for i, piece in enumerate(windows):
        cache = _read(model, piece, queries, report)
        for tier, layer in enumerate(shape.tiered_layers):
            keys = _joint_keys(cache, layer, shape.kv, turns[tier])
            moments[tier] += (keys.T @ keys).cpu()
            squares[tier] += _squares(queries, layer, shape) / len(windows)
        cosines.add(queries)
        queries.forget()
        if i in kept:
            held.append((piece, cache))
    layers = [_adapter_of(*each, rank) for each in zip(moments, squares, turns, strict=True)]
    for piece, cache in held:
        layers = _measured(layers, piece, cache, shape, turns, ranks, report)
    adapter = LowRankAdapter(layers, fingerprint(model), read, cosines.means(), ranks.costs())
    if path is not None:
        adapter.save(path)
    return adapter


def _kept_windows(tokens: Sequence[int]) -> set[int]:
    """Which windows are kept: the longest, and as many more as there is room for, spread evenly."""
    longest = max(range(len(tokens)), key=tokens.__getitem__)
    kept, room = {longest}, KEPT_TOKENS - tokens[longest]
    fitting = 1 + max(0, room // max(tokens))
    for i in np.linspace(0, len(tokens) - 1, fitting).round().astype(int).tolist():
        if i not in kept and tokens[i] <= room:
            kept.add(i)
            room -= tokens[i]
    return kept


def _sums(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Tells `progress` of tokens as they come, all so far and `total`."""
    done = 0

    def report(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(done, total)

    return report


def _windows(texts: Sequence[Tensor], window_tokens: int, shape: ModelShape) -> list[Tensor]:
    """The pieces that are read at once."""
    if window_tokens < 2:
        raise ConfigError(f"window_tokens={window_tokens} must be at least 2")
    window_tokens = min(window_tokens, shape.max_positions)
    windows = [piece for text in texts for piece in torch.split(text.flatten(), window_tokens)]
    windows = [piece for piece in windows if len(piece) > 1]
    if not windows:
        raise PromptError("there is no text to calibrate on")
    return windows


def _turns(
    model: PreTrainedModel, shape: ModelShape, block_tokens: int, tokens: int
) -> list[KeyTurns | None]:
    """What turns each layer's keys of texts of at most so many tokens."""
    if block_tokens < 0:
        raise ConfigError(f"block_tokens={block_tokens} must not be negative")
    if block_tokens == 0:
        return [None] * len(shape.tiered_layers)
    size = (block_tokens, -(-tokens // block_tokens), model_device(model))
    return [each.turns(*size) if each else None for each in key_rotations(model, shape)]


def _squares(queries: LastQueries, layer: int, shape: ModelShape) -> Tensor:
    """How loud the text's last queries of a layer are, see `mean_squares`."""
    return mean_squares(queries.true(layer, COSINE_TOKENS), shape.kv.num_kv_heads).cpu()


def _adapter_of(
    moment: Tensor, squares: Tensor, turns: KeyTurns | None, rank: int
) -> LayerAdapter:  # fmt: skip
    """One layer's, before the range of its components is known.

    Args:
        moment: of keys. [joint_dim, joint_dim]
        squares: of queries, see `mean_squares`. [kv_heads, head_dim]
    """
    if turns is None:
        return LayerAdapter(fit_basis(moment, rank), torch.zeros(rank))
    scale = key_scale(squares, turns.rotation)
    basis = fit_basis(moment * scale * scale[:, None], rank)
    return LayerAdapter(
        basis, torch.zeros(rank), block_tokens=turns.block_tokens, scale=scale
    )  # fmt: skip


def _measured(
    layers: list[LayerAdapter], piece: Tensor, cache: DynamicCache, shape: ModelShape,
    turns: Sequence[KeyTurns | None], ranks: RankMeter, report: Callable[[int], None],
) -> list[LayerAdapter]:  # fmt: skip
    """The layers with the range of a piece's components; `ranks` sees what they cost there."""
    reaching = [
        _reaching(each, _joint_keys(cache, layer, shape.kv, turn))
        for each, layer, turn in zip(layers, shape.tiered_layers, turns, strict=True)
    ]
    scales = [layer.scale for layer in reaching]
    ranks.add(piece, cache, [layer.basis for layer in reaching], report, scales)
    return reaching


def _reaching(layer: LayerAdapter, keys: Tensor) -> LayerAdapter:
    """With a range that holds these keys' components too. keys: [tokens, joint_dim]"""
    scaled = keys if layer.scale is None else keys * layer.scale.to(keys.device)
    reach = (scaled @ layer.basis.to(keys.device)).abs().amax(dim=0).cpu()
    return replace(layer, peak=torch.maximum(layer.peak, reach))


def _read(
    model: PreTrainedModel, tokens: Tensor, queries: LastQueries, report: Callable[[int], None]
) -> DynamicCache:
    """The cache after one text; `queries` watches its last chunk, `report` is told of each."""
    device = model_device(model)
    cache = dynamic_cache(model)
    *before, last = torch.split(tokens.to(device), CHUNK_TOKENS)
    with torch.no_grad():
        for piece in before:
            model(piece[None], **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
            report(len(piece))
        with queries.watching():
            model(last[None], **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
    report(len(last))
    return cache


def _joint_keys(cache: DynamicCache, layer: int, shape: KVShape, turns: KeyTurns | None) -> Tensor:
    """Keys of one layer, the heads side by side, float32. [tokens, joint_dim]"""
    cached: Any = cache.layers[layer]
    keys = joined(shape, cached.keys, cached.values)[0].transpose(1, 2).float()
    if turns is not None:
        keys = turns.keys(keys, 0)
    return keys[0].flatten(1)


class _CosineMeter:
    """Compares each layer's query with the one made from the layer before's input."""

    def __init__(self, shape: ModelShape) -> None:
        self._layers, self._shape = shape.tiered_layers, shape
        self._sums = [0.0] * len(self._layers)
        self._counts = [0] * len(self._layers)

    def add(self, queries: LastQueries) -> None:
        """Compare all layers on the text that was read."""
        for tier, layer in enumerate(self._layers):
            if can_predict(self._shape, layer):
                true = queries.true(layer, COSINE_TOKENS)
                predicted = queries.made_from(layer - 1, layer, COSINE_TOKENS)
                cosine = torch.nn.functional.cosine_similarity(true, predicted, dim=-1)
                self._sums[tier] += float(cosine.mean())
                self._counts[tier] += 1

    def means(self) -> tuple[float, ...]:
        """Mean cosine of every tiered layer; 0 where there is no layer before of its kind."""
        return tuple(s / c if c else 0.0 for s, c in zip(self._sums, self._counts, strict=True))
