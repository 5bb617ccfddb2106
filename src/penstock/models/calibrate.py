"""Calibration: fit a model's low-rank adapter on text, and see which queries can be predicted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import ConfigError, PromptError
from penstock.indexes.adapter import LayerAdapter, LowRankAdapter, fit_basis
from penstock.models.attention_adapter import Attachment
from penstock.models.fingerprint import fingerprint
from penstock.models.model_shape import ModelShape, inspect_model
from penstock.models.query_projection import QueryProjection, decoder_layers

DEFAULT_RANK = 128
DEFAULT_WINDOW_TOKENS = 8192
CHUNK_TOKENS = 1024
COSINE_TOKENS = 64
"""Tokens of each text on which the query prediction is judged."""


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    rank: int | None = None,
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    path: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LowRankAdapter:
    """Fit an adapter by SVD of the post-RoPE keys of calibration text (KVSwap 3.2, A.1).

    Two passes over the text: Gram matrices first, then the range of the projected components. Give
    varied text, and windows as long as the prompts to come: post-RoPE keys turn with the position.

    Args:
        model: the model, on any device.
        texts: token ids of separate documents, int64. Each [tokens]
        rank: components to keep; default 128, or the whole width if that is less.
        window_tokens: longest piece of a text that is read at once.
        path: where to save the adapter, if anywhere.
        progress: called with (tokens done, tokens in all) over both passes.

    Returns:
        The adapter, with the model's fingerprint.

    Raises:
        ConfigError: the rank is not possible.
        PromptError: there is no text.
    """
    shape = inspect_model(model)
    rank = min(DEFAULT_RANK, shape.kv.joint_dim) if rank is None else rank
    if not 1 <= rank <= shape.kv.joint_dim:
        raise ConfigError(f"rank={rank} must be between 1 and {shape.kv.joint_dim}")
    windows = [piece for text in texts for piece in torch.split(text.flatten(), window_tokens)]
    windows = [piece for piece in windows if len(piece) > 1]
    if not windows:
        raise PromptError("there is no text to calibrate on")
    total, done = 2 * sum(len(piece) for piece in windows), 0
    moments = [torch.zeros(shape.kv.joint_dim, shape.kv.joint_dim) for _ in shape.tiered_layers]
    meter = _CosineMeter(model, shape)
    for piece in windows:
        for tier, keys in enumerate(_keys(model, shape, piece, meter)):
            moments[tier] += (keys.T @ keys).cpu()
        done += len(piece)
        if progress is not None:
            progress(done, total)
    bases = [fit_basis(moment, rank) for moment in moments]
    peaks = [torch.zeros(rank) for _ in bases]
    for piece in windows:
        for tier, keys in enumerate(_keys(model, shape, piece, None)):
            reach = (keys @ bases[tier].to(keys.device)).abs().amax(dim=0).cpu()
            peaks[tier] = torch.maximum(peaks[tier], reach)
        done += len(piece)
        if progress is not None:
            progress(done, total)
    layers = [LayerAdapter(basis, peak) for basis, peak in zip(bases, peaks, strict=True)]
    adapter = LowRankAdapter(layers, fingerprint(model), total // 2, meter.cosines())
    if path is not None:
        adapter.save(path)
    return adapter


def _keys(
    model: PreTrainedModel, shape: ModelShape, tokens: Tensor, meter: "_CosineMeter | None"
) -> list[Tensor]:
    """Keys of one text, one [tokens, joint_dim] float32 tensor per tiered layer."""
    device = model.get_input_embeddings().weight.device
    cache = DynamicCache(config=model.config)
    pieces = list(torch.split(tokens.to(device), CHUNK_TOKENS))
    with torch.no_grad():
        for i, piece in enumerate(pieces):
            judge = meter is not None and i == len(pieces) - 1
            if judge and meter is not None:
                meter.open()
            try:
                model(piece[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            finally:
                if judge and meter is not None:
                    meter.close()
    out = []
    for layer in shape.tiered_layers:
        keys: Any = cache.layers[layer].keys
        out.append(keys[0].transpose(0, 1).flatten(1).float())
    return out


class _CosineMeter:
    """Compares each layer's query with the one made from the layer before's input."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape) -> None:
        self._model = model
        self._shape = shape
        self._layers = decoder_layers(model)
        self._projection = QueryProjection(self._layers)
        self._sums = [0.0] * len(shape.tiered_layers)
        self._counts = [0] * len(shape.tiered_layers)
        self._inputs: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        """Watch the inputs of all layers."""
        for i, layer in enumerate(self._layers):
            self._handles.append(
                layer.register_forward_pre_hook(self._watcher(i), with_kwargs=True)
            )

    def _watcher(self, i: int) -> Callable[..., None]:
        def watch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._inputs[i] = (hidden, {k: v for k, v in kwargs.items() if k != "hidden_states"})

        return watch

    def close(self) -> None:
        """Compare, and stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        types = self._shape.layer_types
        attachment = Attachment(self._model)
        try:
            for tier, layer in enumerate(self._shape.tiered_layers):
                if layer > 0 and types[layer - 1] == types[layer] and layer in self._inputs:
                    self._compare(tier, layer)
        finally:
            attachment.detach()
        self._inputs = {}

    def _compare(self, tier: int, layer: int) -> None:
        (before, _), (hidden, kwargs) = self._inputs[layer - 1], self._inputs[layer]
        true = self._projection.probe(layer, hidden, kwargs)[:, :, -COSINE_TOKENS:].float()
        predicted = self._projection.probe(layer, before, kwargs)[:, :, -COSINE_TOKENS:].float()
        cosine = torch.nn.functional.cosine_similarity(true, predicted, dim=-1)
        self._sums[tier] += float(cosine.mean())
        self._counts[tier] += 1

    def cosines(self) -> tuple[float, ...]:
        """Mean cosine of every tiered layer; 0 where there is no layer before of its kind."""
        return tuple(s / c if c else 0.0 for s, c in zip(self._sums, self._counts, strict=True))
