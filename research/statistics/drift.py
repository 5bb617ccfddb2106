"""How far keys of decoded tokens lie from the prompt's clusters, as decoding goes on."""

import torch
from torch import Tensor

from penstock.kernels.kmeans import kmeans, nearest

CLUSTER_TOKENS = 16
"""Mean size of a cluster (LouisKV, section 5.1; DynaKV names none)."""
FITTED_TOKENS = 8192
"""Most tokens of the prompt that are clustered."""
HELD_OUT = 8
"""One of so many tokens of the prompt is kept out of the clustering."""
_ITERATIONS = 10
_ELEMENTS = 1 << 22


def squared_distances(points: Tensor, centroids: Tensor) -> Tensor:
    """Squared distance of each point from the nearest centroid.

    Args:
        points: [sets, points, dim]
        centroids: [sets, clusters, dim]

    Returns:
        float32 [sets, points]
    """
    index = nearest(points, centroids, cosine=False, elements=_ELEMENTS)
    own = centroids.float().gather(1, index.unsqueeze(-1).expand(*index.shape, points.shape[-1]))
    return (points.float() - own).square().sum(dim=-1)


def held_out(tokens: int, seed: int) -> Tensor:
    """One of `HELD_OUT` tokens, drawn: every eighth would all be alike in a text with a rhythm.

    Args:
        tokens: at least 2.

    Returns:
        At least one True and one False. bool [tokens]
    """
    drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[drawn[: max(1, tokens // HELD_OUT)]] = True
    return mask


def drift(keys: Tensor, prompt_tokens: int, *, seed: int = 0) -> Tensor:
    """Squared distances of decoded keys from the prompt's centroids, in units of the prompt's own.

    Source: DynaKV, section 2.3 and figure 4: "newly generated entries may be distant from all
    existing clusters", so that a static update raises the variance within clusters (table 5).

    Differences: the paper shows a projection and names no distance. Here clusters are k-means of
    the prompt's keys, per KV head, and stay as they are; the unit is the mean squared distance of
    prompt tokens that took no part in the clustering (`held_out`), because those that did are
    nearer to their centroids for that reason alone. 1 means no drift: a decoded token is as
    far from the clusters as any other token of the prompt.

    Post-RoPE keys turn with the position, and decoded tokens are at positions that no prompt token
    had: part of their distance. Pre-RoPE keys tell the rest.

    Args:
        keys: [kv_heads, prompt tokens + decoded tokens, dim]
        prompt_tokens: at least 2.

    Returns:
        The mean over KV heads, for each decoded token. float64 [decoded tokens]
    """
    stride = -(-prompt_tokens // FITTED_TOKENS)
    prompt = keys[:, :prompt_tokens][:, ::stride]
    kept_out = held_out(prompt.shape[1], seed).to(keys.device)
    fitted = prompt[:, ~kept_out]
    clusters = max(1, fitted.shape[1] // CLUSTER_TOKENS)
    centroids = kmeans(
        fitted, clusters, iterations=_ITERATIONS, cosine=False, seed=seed, elements=_ELEMENTS
    )
    unit = squared_distances(prompt[:, kept_out], centroids).double().mean(dim=1, keepdim=True)
    found = squared_distances(keys[:, prompt_tokens:], centroids).double()
    return (found / unit.clamp_min(1e-30)).mean(dim=0)
