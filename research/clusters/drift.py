"""How far the output's keys are from the prompt's clusters, by place in the output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.kmeans import kmeans, nearest
from research.clusters.key_stream import KeyStream
from research.statistics.drift import held_out, squared_distances

ITERATIONS = 10
ELEMENTS = 1 << 22
PARTS = 8
"""Equal parts of the output in which drift is told."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """One layer's drift; everything by KV head."""

    outside: Tensor
    """Share of the output's keys that are farther from the nearest cluster of the prompt than any
    key of that cluster. float32 [kv_heads, parts]"""
    outside_prompt: Tensor
    """The same of prompt tokens that took no part in the clustering: what is outside without any
    drift. float32 [kv_heads]"""
    distance: Tensor
    """Mean squared distance from the nearest cluster, in that of those prompt tokens. float32
    [kv_heads, parts]"""
    shift: Tensor
    """Distance of the mean key from the prompt's mean key, in root mean square distances of the
    prompt's keys from it. float32 [kv_heads, parts]"""


def measure_drift(keys: Tensor, prompt_tokens: int, *, cluster_tokens: int, seed: int) -> Drift:
    """Compare a layer's output keys with clusters of its prompt's keys.

    Source: DynaKV, section 2.3: "newly generated entries may be distant from all existing
    clusters". The paper shows a projection; shares and distances are ours.

    Any new key is farther away than the keys that a cluster was made of, drift or not: one prompt
    token of eight is left out of the clustering and says how often and how far.

    Args:
        keys: prompt and output. [kv_heads, tokens, head_dim]
        cluster_tokens: mean size of a cluster.
    """
    prompt, output = keys[:, :prompt_tokens], keys[:, prompt_tokens:]
    kept_out = held_out(prompt_tokens, seed)
    fitted = prompt[:, ~kept_out]
    centroids = kmeans(
        fitted, max(1, fitted.shape[1] // cluster_tokens), iterations=ITERATIONS, cosine=False,
        seed=seed, elements=ELEMENTS,
    )  # fmt: skip
    own = nearest(fitted, centroids, cosine=False, elements=ELEMENTS)
    far = squared_distances(fitted, centroids)
    radius = far.new_zeros(centroids.shape[:2]).scatter_reduce_(1, own, far, "amax")
    calm, calm_far = _outside(prompt[:, kept_out], centroids, radius)
    new, new_far = _outside(output, centroids, radius)
    mean = prompt.mean(dim=1, keepdim=True)
    unit = (prompt - mean).square().sum(dim=-1).mean(dim=1).sqrt()
    parts = min(PARTS, output.shape[1])
    means = torch.stack([part.mean(dim=1) for part in output.tensor_split(parts, dim=1)], dim=1)
    return Drift(
        outside=_by_part(new.float(), parts), outside_prompt=calm.float().mean(dim=1),
        distance=_by_part(new_far, parts) / calm_far.mean(dim=1, keepdim=True),
        shift=(means - mean).norm(dim=-1) / unit[:, None],
    )  # fmt: skip


def drift_figures(
    stream: KeyStream, *, cluster_tokens: int, seed: int
) -> tuple[dict[str, Any], Tensor]:
    """Drift of all layers: the means over KV heads, for JSON.

    Returns:
        The figures, and the share outside in the last part by layer and KV head, float32
        [layers, kv_heads].
    """
    found = [
        measure_drift(keys, stream.prompt_tokens, cluster_tokens=cluster_tokens, seed=seed)
        for keys in stream.keys
    ]
    parts = found[0].outside.shape[1]
    ends = [part[-1] + 1 for part in _parts(stream.output_tokens, parts)]
    figures = {
        "parts": parts, "part_ends": ends,
        "outside": [_rounded(one.outside.mean(dim=0)) for one in found],
        "outside_prompt": [round(float(one.outside_prompt.mean()), 4) for one in found],
        "distance": [_rounded(one.distance.mean(dim=0)) for one in found],
        "shift": [_rounded(one.shift.mean(dim=0)) for one in found],
    }  # fmt: skip
    return figures, torch.stack([one.outside[:, -1] for one in found])


def _outside(points: Tensor, centroids: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Which points no cluster reaches to, and squared distances; both [kv_heads, points]."""
    index = nearest(points, centroids, cosine=False, elements=ELEMENTS)
    far = squared_distances(points, centroids)
    return far > radius.gather(1, index), far


def _by_part(values: Tensor, parts: int) -> Tensor:
    """Means over equal parts. [kv_heads, points] -> [kv_heads, parts]"""
    return torch.stack([part.mean(dim=1) for part in values.tensor_split(parts, dim=1)], dim=1)


def _parts(tokens: int, parts: int) -> list[list[int]]:
    return [part.tolist() for part in torch.arange(tokens).tensor_split(parts)]


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values]
