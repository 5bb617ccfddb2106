"""Bases of a low-rank index: which components of the keys of a token are kept, heads together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from research.index_study.layer import Layer

FLOOR = 0.3
"""Part of a head's mean square that is added to a component's."""
_BLOCKS = 16
"""Blocks that each kept query is turned to, for a covariance."""
_LEAST = 1e-3
"""Of the largest eigenvalue of a covariance."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Linear codes of joint keys, and what they stand for."""

    encoder: Tensor
    """float32 [kv_heads * head_dim, kv_heads * head_dim], strongest component first"""
    decoder: Tensor
    """float32, of the same shape"""
    mean: Tensor
    """Taken off the keys before. float32 [kv_heads * head_dim]"""


def joint(keys: Tensor) -> Tensor:
    """The heads of a token side by side. [tokens, kv_heads * head_dim]"""
    return keys.transpose(0, 1).flatten(1)


def apart(keys: Tensor, kv_heads: int) -> Tensor:
    """The inverse of `joint`."""
    return keys.view(len(keys), kv_heads, -1).transpose(0, 1)


def fit(
    layer: Layer, block: int, *, weight: tuple[Tensor, Tensor] | None = None,
    centred: bool = False, tokens: Tensor | None = None,
) -> Basis:  # fmt: skip
    """The components that explain most of the keys, turned back by blocks.

    Args:
        weight: a matrix that keys are multiplied by first, and its inverse: with a root of the
            queries' second moment, what is explained is the squared logits.
        centred: take the mean off before.
        tokens: weights of the keys. [tokens]
    """
    keys = joint(layer.turned_back(block))
    mean = keys.mean(0) if centred else torch.zeros(keys.shape[1])
    keys = keys - mean
    if weight is not None:
        keys = keys @ weight[0]
    if tokens is not None:
        keys = keys * tokens.sqrt()[:, None]
    vectors = torch.linalg.eigh((keys.T @ keys).double()).eigenvectors.flip(1).float()
    if weight is None:
        return Basis(encoder=vectors, decoder=vectors, mean=mean)
    return Basis(encoder=weight[0] @ vectors, decoder=weight[1] @ vectors, mean=mean)


def by_scale(
    layer: Layer, floor: float = FLOOR, heads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Root mean squares of the kept queries by KV head and rotary pair, as a `weight` of `fit`.

    Args:
        floor: see `FLOOR`.
        heads: weights of the query heads.
    """
    squares = layer.kept.square()
    if heads is not None:
        squares = squares * heads[:, None, None]
    means = squares.reshape(len(layer.keys), -1, *squares.shape[1:]).mean((1, 2))
    left, right = means.chunk(2, dim=1)
    means = torch.cat([left + right] * 2, dim=1)
    scale = (means + floor * means.mean(1, keepdim=True)).sqrt().flatten()
    return torch.diag(scale), torch.diag(scale.reciprocal())


def by_covariance(layer: Layer, block: int) -> tuple[Tensor, Tensor]:
    """Roots of the second moments of queries by KV head, as a `weight` of `fit`."""
    seen = layer.seen(block, _BLOCKS)
    seen = seen.reshape(len(layer.keys), -1, seen.shape[2])
    values, vectors = torch.linalg.eigh((seen.mT @ seen).double())
    roots = values.clamp_min(_LEAST * values.amax(1, keepdim=True)).sqrt()[:, None]
    weight = (vectors * roots) @ vectors.mT
    inverse = (vectors / roots) @ vectors.mT
    return _along_the_diagonal(weight), _along_the_diagonal(inverse)


def _along_the_diagonal(blocks: Tensor) -> Tensor:
    """One matrix of several. float32"""
    whole: Tensor = torch.block_diag(*blocks.float())  # type: ignore[no-untyped-call]
    return whole


def received(layer: Layer, queries: int = 32) -> Tensor:
    """Attention that each token gets from the newest kept queries, sinks left out. [tokens]"""
    query, places = layer.kept[:, -queries:], layer.places[-queries:]
    grouped = query.reshape(len(layer.keys), -1, *query.shape[1:])
    logits = (grouped @ layer.keys[:, None].mT) * layer.scaling
    later = torch.arange(layer.keys.shape[1]) > places[:, None]
    shares = logits.masked_fill(later, float("-inf")).softmax(-1).sum((0, 1)).mean(0)
    shares[:4] = 0.0
    return shares + 0.01 * shares.mean()
