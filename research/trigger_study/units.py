"""One layer's units, as LouisKV makes them, and what every step attends to in each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.kmeans import kmeans, nearest
from penstock.methods.louiskv.block_clusterer import ITERATIONS, num_clusters
from research.trigger_study.capture import Capture

_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What is always attended to, and how large units are."""

    window: int
    sinks: int
    cluster: int
    """Tokens of a cluster on average, and of a segment."""
    block: int
    """Prompt tokens that are clustered together."""


@dataclass(frozen=True, kw_only=True)
class LayerSteps:
    """One layer, by KV head, step and unit; a unit's tokens in the window do not count."""

    logits: Tensor
    """Of the units' mean keys, scaled. float32 [rows, heads of a row, steps, units]"""
    sizes: Tensor
    """Tokens that may be selected. int64 [rows, steps, units]"""
    mass: Tensor
    """Attention on them. float32 [rows, heads of a row, steps, units]"""
    edge: Tensor
    """Attention on sinks and window. float32 [rows, heads of a row, steps]"""
    lse: Tensor
    """Log-sum-exp of all logits. float32 [rows, heads of a row, steps]"""
    queries: Tensor
    """Post-RoPE. float32 [steps, heads, head_dim]"""


def layer_steps(capture: Capture, layer: int, window: Window, device: torch.device) -> LayerSteps:
    """Cluster the prompt's keys, cut what follows into segments, and attend."""
    keys = capture.keys[layer].to(device).float()
    queries = capture.queries[layer].to(device).float()
    prompt, (rows, tokens, dim) = capture.prompt_tokens, keys.shape
    steps = len(queries)
    label, units = _labels(keys, prompt, window)
    units_of = label.unsqueeze(-1).expand(-1, -1, dim)
    count = torch.zeros(rows, units, device=device)
    count.scatter_add_(1, label, torch.ones_like(label, dtype=torch.float32))
    means = torch.zeros(rows, units, dim, device=device).scatter_add_(1, units_of, keys)
    means /= count.clamp_min(1.0).unsqueeze(-1)
    grouped = queries.view(steps, rows, -1, dim).permute(1, 2, 0, 3) * capture.scaling
    heads = grouped.shape[1]
    places = torch.arange(tokens, device=device)
    now = torch.arange(prompt, prompt + steps, device=device).unsqueeze(1)
    selectable = (places >= window.sinks) & (places <= now - window.window)
    sizes = torch.zeros(rows, steps, units, dtype=torch.int64, device=device)
    sizes.scatter_add_(2, label[:, None].expand(-1, steps, -1),
                       selectable.long().expand(rows, -1, -1))  # fmt: skip
    mass = torch.zeros(rows, heads, steps, units, device=device)
    edge, lse = torch.empty(2, rows, heads, steps, device=device).unbind()
    for row in range(rows):
        for head in range(heads):
            logits = grouped[row, head] @ keys[row].T
            logits.masked_fill_(places > now, -torch.inf)
            lse[row, head] = torch.logsumexp(logits, dim=1)
            shares = (logits - lse[row, head].unsqueeze(1)).exp()
            edge[row, head] = shares.masked_fill(selectable, 0.0).sum(dim=1)
            shares.masked_fill_(~selectable, 0.0)
            mass[row, head].scatter_add_(1, label[row].expand(steps, -1), shares)
    return LayerSteps(
        logits=grouped @ means.transpose(1, 2).unsqueeze(1), sizes=sizes, mass=mass, edge=edge,
        lse=lse, queries=queries,
    )  # fmt: skip


def _labels(keys: Tensor, prompt: int, window: Window) -> tuple[Tensor, int]:
    """The unit of each token, int64 [rows, tokens], and how many there are."""
    label = torch.empty(keys.shape[:2], dtype=torch.int64, device=keys.device)
    units = 0
    for start in range(0, prompt, window.block):
        block = keys[:, start : min(start + window.block, prompt)]
        clusters = num_clusters(block.shape[1], window.cluster)
        means = kmeans(
            block, clusters, iterations=ITERATIONS, cosine=False, seed=0, elements=_ELEMENTS
        )
        found = nearest(block, means, cosine=False, elements=_ELEMENTS)
        label[:, start : start + block.shape[1]] = found.long() + units
        units += clusters
    after = torch.arange(keys.shape[1] - prompt, device=keys.device) // window.cluster
    label[:, prompt:] = after + units
    return label, units + int(after[-1]) + 1
