"""make_cluster_layers(): the layers of a DynaKV cache, and what they share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engine.layer_builder import LayerBuilder
from penstock.engine.layer_cache import LayerSetup
from penstock.methods.dynakv.index import FollowedClusters
from penstock.methods.dynakv.layer import ClusterBuffers, ClusterLayer
from penstock.methods.dynakv.layout import ClusterLayout
from penstock.methods.dynakv.pooled_clusters import PooledClusters
from penstock.methods.dynakv.representative_file import RepresentativeBuffer, RepresentativeFile
from penstock.methods.dynakv.representatives import LayerRepresentatives

if TYPE_CHECKING:
    from penstock.methods.dynakv.policy import DynaKV

SHARED_BUFFERS = 2
"""Layers whose representatives are in memory at once where they come from the store: the one that
computes, and the next one's are on their way."""


def make_cluster_layers(policy: "DynaKV", builder: LayerBuilder) -> Sequence[ClusterLayer]:
    """Make the layers.

    Args:
        policy: with every open choice made.
    """
    setup = builder.setup
    shared, buffers = _representative_buffers(policy, setup), _cluster_buffers(policy, setup)
    layers = []
    for i in builder.numbers:
        request = builder.index_request(i)
        buffer = shared[i % len(shared)] if shared else None
        if buffer is not None:
            request = replace(request, shared=buffer.vectors)
        index = policy.make_index(request)
        followed = index.unwrapped
        assert isinstance(followed, FollowedClusters)
        representatives = None
        if buffer is not None:
            number = (policy.files_per_layer - 1) * builder.num_layers + i
            file = RepresentativeFile(setup.store.region(number).file, buffer)
            representatives = LayerRepresentatives(i, file, followed, setup)
        layout = None
        if policy.has_cluster_layout:
            layout = _make_layout(builder.num_layers + i, policy, setup, followed)
        layers.append(
            ClusterLayer(i, setup, builder.pool(i), policy, index, layout, buffers, representatives)
        )
    if policy.virtual and setup.plan.shared_pools:
        _chain(layers)
    _read_ahead(layers)
    return layers


def _chain(layers: Sequence[ClusterLayer]) -> None:
    """Let each layer fill the slots of the next one while it attends; the last, those of the first
    one for the next step, where they are not its own."""
    for i, layer in enumerate(layers):
        if i + 1 < len(layers) or len(layers) % 2 == 0:
            layer.following_layer = layers[(i + 1) % len(layers)]
        former = layers[i - 2 if i >= 2 else (len(layers) - 1 - i) // 2 * 2 + i]
        layer.former_layer = None if former is layer else former


def _read_ahead(layers: Sequence[ClusterLayer]) -> None:
    """Let each layer ask for the representatives of the next one; the last, for those of the first
    one for the next step."""
    found = [layer.representatives for layer in layers]
    for i, one in enumerate(found):
        if one is not None:
            one.reads_ahead = found[(i + 1) % len(found)]


def _representative_buffers(policy: "DynaKV", setup: LayerSetup) -> list[RepresentativeBuffer]:
    """Memory that layers in turn have their representatives in; none where each has its own."""
    if policy.representatives != "flash":
        return []
    shape, plan = setup.shape, setup.plan
    capacity = policy.cluster_sizes.capacity(plan.max_units)
    size = (plan.batch, capacity, shape.head_dim, setup.store.region(0).file.sector_bytes)
    count = min(SHARED_BUFFERS, shape.num_layers)
    return [RepresentativeBuffer(*size) for _ in range(count)]


def _cluster_buffers(policy: "DynaKV", setup: LayerSetup) -> ClusterBuffers | None:
    if not policy.has_cluster_layout or setup.staging is not None:
        return None
    size = policy.read_bytes(setup.shape, setup.plan.batch, setup.plan.selected_units)
    return ClusterBuffers(size, setup.store.region(0).file.sector_bytes)


def _make_layout(
    region: int, policy: "DynaKV", setup: LayerSetup, index: FollowedClusters
) -> ClusterLayout:
    assert policy.write_buffers is not None, "plan() makes the choices"
    file = PooledClusters(
        setup.store.region(region).file, setup.shape.token_bytes,
        num_buffers=policy.write_buffers, gap_bytes=policy.gap_bytes,
    )  # fmt: skip
    capacity = policy.cluster_sizes.capacity(setup.plan.max_units)
    return ClusterLayout(
        file, index, rows=setup.plan.batch, max_tokens=setup.plan.max_units, capacity=capacity
    )
