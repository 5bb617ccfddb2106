"""k-means of a prompt beside the prefill of the same prompt."""

import time
from typing import Any

import torch

from penstock.kernels.device.clusters import cluster_keys
from penstock.methods.louiskv.block_clusterer import ITERATIONS, num_clusters
from penstock.methods.louiskv.device_index import DeviceUnitSizes
from penstock.models.plain_model import random_model
from penstock.models.query_projection import decoder_layers
from research.device_tier.kernel_cases import DIM, Cases, Grid, KernelCase
from research.device_tier.step_timer import new_event

CLUSTER_TOKENS = 16
KMEANS = "kmeans"


def cluster_cases(grid: Grid, device: torch.device) -> Cases:
    """A layer's prompt keys into clusters, as a whole or block after block."""
    rows = grid.kv_heads
    points = torch.randn(rows, grid.tokens, DIM, device=device).to(torch.bfloat16)
    for block in grid.cluster_blocks:
        clusters = num_clusters(block, CLUSTER_TOKENS)
        sizes = DeviceUnitSizes(cluster_tokens=CLUSTER_TOKENS, block_tokens=block, spare_units=0)

        def cluster(block: int = block, clusters: int = clusters, sizes: Any = sizes) -> None:
            blocks = points.view(rows, -1, block, DIM)
            for part in torch.split(
                blocks, sizes.blocks_together(rows), dim=1
            ):  # as the index does
                cluster_keys(
                    part, clusters, iterations=ITERATIONS, cosine=False, seed=0,
                    elements=sizes.elements(rows),
                )  # fmt: skip

        products = 2 * rows * grid.tokens * clusters * DIM * (ITERATIONS + 1)
        yield KernelCase(
            kernel=KMEANS, size=f"{rows} heads x {grid.tokens} keys, blocks of {block}",
            calls=[cluster],
            twins=[cluster] if block == grid.cluster_blocks[0] else [], flops=products,
            ceiling="matmul",
        )  # fmt: skip


def prefill_layer_s(config: str, tokens: int, device: torch.device, seed: int = 0) -> float:
    """Seconds of one layer in a prefill of `tokens` tokens in one pass, without a cache.

    Of the second of two layers, the faster of two passes after a first one.
    """
    model: Any = random_model(config, max_positions=tokens, device=device, seed=seed, layers=2)
    layer = decoder_layers(model)[1]
    marks: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_: marks.append(_now(device))),
        layer.register_forward_hook(lambda *_: marks.append(_now(device))),
    ]
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    if device.type == "cuda":
        torch.cuda.synchronize()
    pairs = list(zip(marks[::2], marks[1::2], strict=True))[1:]
    return min(_between(a, b) for a, b in pairs)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = new_event()
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) / 1e3
