"""One head's keys in a plane: prompt, early and late output, and which cluster each belongs to."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from research.clusters.variance import renumbered

MOST_POINTS = 900
"""Tokens of a picture, evenly spaced; more hide each other."""


def plane(keys: Tensor) -> tuple[Tensor, Tensor, float]:
    """The two directions in which keys differ most (PCA).

    Args:
        keys: of one head. [tokens, head_dim]

    Returns:
        The mean key, float64 [head_dim]; the directions, float64 [head_dim, 2]; and the share of
        the variance that they show.
    """
    points = keys.double()
    mean = points.mean(dim=0)
    _, values, rows = torch.linalg.svd(points - mean, full_matrices=False)
    energy = values.square()
    return mean, rows[:2].T.contiguous(), float(energy[:2].sum() / energy.sum().clamp_min(1e-30))


def picture(
    keys: Tensor, prompt_tokens: int, *, before: Tensor, after: Tensor, name: str
) -> dict[str, Any]:  # fmt: skip
    """What a drawing needs, for JSON: places in the plane, as thousandths of the farthest.

    Args:
        keys: of one head, prompt and output. [tokens, head_dim]
        before: each token's cluster when only the prompt's clusters exist. int64 [tokens]
        after: each token's cluster at the end. int64 [tokens]
        name: of the head.
    """
    mean, directions, shown = plane(keys)
    flat = (keys.double() - mean) @ directions
    scale = flat.abs().max().clamp_min(1e-30) / 1000
    tokens = torch.linspace(0, len(keys) - 1, min(MOST_POINTS, len(keys))).long()
    out: dict[str, Any] = {
        "name": name, "variance_shown": round(shown, 4),
        "prompt_tokens": prompt_tokens, "tokens": len(keys),
        "token": _line(tokens), "x": _line(flat[tokens, 0] / scale),
        "y": _line(flat[tokens, 1] / scale),
    }  # fmt: skip
    for kind, labels in (("before", before), ("after", after)):
        names, dense = renumbered(labels)
        sums = flat.new_zeros(names, 2).index_add_(0, dense, flat)
        sizes = torch.bincount(dense, minlength=names)
        if kind == "before":  # the prompt's clusters: their centre is that of the prompt's keys
            first = dense[:prompt_tokens]
            sums = flat.new_zeros(names, 2).index_add_(0, first, flat[:prompt_tokens])
            sizes = torch.bincount(first, minlength=names)
        centres = sums / sizes.clamp_min(1)[:, None] / scale
        out[kind] = {
            "cluster": _line(dense[tokens]), "x": _line(centres[:, 0]), "y": _line(centres[:, 1]),
            "first_token": _line(_first(dense, names)),
        }  # fmt: skip
    return out


def numbers(line: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Read back what a picture keeps in a line of text."""
    return np.array(line.split(), dtype=np.int64)


def chosen_heads(late: Tensor) -> list[tuple[int, int]]:
    """The head in the middle by drift, and the one that drifts most.

    Args:
        late: share of late output keys outside all clusters. [layers, kv_heads]
    """
    order = late.flatten().argsort(stable=True).tolist()
    heads = late.shape[1]
    middle, most = order[len(order) // 2], order[-1]
    return [divmod(place, heads) for place in dict.fromkeys((middle, most))]


def _first(dense: Tensor, count: int) -> Tensor:
    """The first token of each cluster."""
    places = torch.arange(len(dense))
    out = torch.full((count,), len(dense), dtype=torch.int64)
    return out.scatter_reduce_(0, dense, places, "amin")


def _line(values: Tensor) -> str:
    """Whole numbers in one line of text: a line a number would make files of thousands of lines."""
    return " ".join(str(int(value)) for value in values.round())
