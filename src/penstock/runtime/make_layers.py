"""make_layers() and resident_layers(): the layers that a plan asks for, with their memory."""

from dataclasses import replace

import torch

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.indexes.device_tier.base import StepClock
from penstock.indexes.followed_clusters import FollowedClusters
from penstock.near_storage.near_index import NearIndex
from penstock.near_storage.near_store import NearStore
from penstock.near_storage.scorer import LocalScorer, Scorer
from penstock.policies.base import IndexRequest, SelectionPolicy
from penstock.policies.dynakv import SHARED_BUFFERS, DynaKV
from penstock.policies.hillinfer import HillInfer
from penstock.runtime.cluster_layer import ClusterBuffers, ClusterLayer
from penstock.runtime.cluster_layout import ClusterLayout
from penstock.runtime.compact_pool import CompactPool
from penstock.runtime.device_tier.device_layer import DeviceLayer, DeviceSetup
from penstock.runtime.device_tier.whole_layer import WholeLayer
from penstock.runtime.device_tier.workspace import Workspace
from penstock.runtime.layer_cache import LayerCache, LayerSetup
from penstock.runtime.layer_representatives import LayerRepresentatives
from penstock.runtime.near_layer import NearLayer
from penstock.runtime.near_work import NearWork
from penstock.runtime.resident_layer import ResidentLayer
from penstock.runtime.retrieval_layer import RetrievalLayer
from penstock.runtime.runtime_config import RuntimeConfig
from penstock.runtime.slot_transfer import PoolMemory
from penstock.storage.pooled_clusters import PooledClusters
from penstock.storage.representative_file import RepresentativeBuffer, RepresentativeFile

AnyLayer = LayerCache | ResidentLayer | DeviceLayer


def resident_layers(
    count: int, shape: KVShape, plan: SlotPlan, max_tokens: int, device: torch.device
) -> list[AnyLayer]:
    """The first `count` layers, all of each in fast memory. shape: of a row."""
    return [ResidentLayer(i, shape, plan.batch, max_tokens, device) for i in range(count)]


def make_layers(
    config: RuntimeConfig, policy: SelectionPolicy, setup: LayerSetup
) -> list[AnyLayer]:
    """All layers of a tiered cache; those that the policy keeps whole come first.

    Args:
        policy: with every open choice made, as `plan` returned it.
    """
    plan = setup.plan
    whole = 0 if config.exact else policy.whole_layers
    rows = plan.batch * (plan.num_slots + plan.tail_slots)
    size = (rows, plan.unit_bytes, setup.store.row_bytes, setup.device)
    pools: list[PoolMemory] = []
    compact = CompactPool(setup) if plan.compact else None
    buffers, shared = _cluster_buffers(policy, setup), _representative_buffers(policy, setup)
    near = _near_work(config, policy, setup)
    layers = resident_layers(whole, setup.shape, plan, config.max_tokens, config.device)
    for i in range(whole, config.shape.num_layers):
        if not plan.shared_pools or len(pools) < 2:
            pools.append(PoolMemory.allocate(*size))
        memory = pools[(i - whole) % 2] if plan.shared_pools else pools[-1]
        centroids = shared[i % len(shared)] if shared and not config.exact else None
        layers.append(
            _make_layer(i, config, policy, setup, memory, compact, buffers, near, centroids)
        )
    if isinstance(policy, DynaKV) and policy.virtual and plan.shared_pools:
        _chain(layers[whole:])
    _read_ahead(layers[whole:])
    return layers


def device_layers(
    config: RuntimeConfig, policy: SelectionPolicy, plan: SlotPlan, shape: KVShape,
    rows_per_sequence: int, clock: StepClock,
) -> list[AnyLayer]:  # fmt: skip
    """All layers of the device tier; those that the policy keeps whole come first.

    Args:
        policy: with every open choice made, as `plan` returned it.
        shape: of a row.
    """
    whole = 0 if config.exact else policy.whole_layers
    setup = DeviceSetup(
        shape=shape, plan=plan, device=config.device, clock=clock,
        workspace=Workspace(plan, shape, config.device),
    )  # fmt: skip
    size = (plan.batch, config.max_tokens, clock)
    layers: list[AnyLayer] = [WholeLayer(i, shape, *size) for i in range(whole)]
    for i in range(whole, config.shape.num_layers):
        index = None
        if policy.retrieves and not config.exact:
            request = _index_request(i, config, plan, shape, rows_per_sequence)
            index = policy.make_device_index(request)
        layers.append(DeviceLayer(i, setup, index))
    return layers


def _index_request(
    i: int, config: RuntimeConfig, plan: SlotPlan, shape: KVShape, rows_per_sequence: int
) -> IndexRequest:
    return IndexRequest(
        shape=shape, batch=plan.batch, max_groups=plan.max_groups, group_tokens=plan.group_tokens,
        scaling=config.logit_scaling, adapter=None if config.adapter is None else config.adapter[i],
        device=config.device, score_tokens=plan.score_tokens, selected_groups=plan.selected_groups,
        rows_per_sequence=rows_per_sequence, rotary=config.rotary,
    )  # fmt: skip


def _make_layer(
    i: int, config: RuntimeConfig, policy: SelectionPolicy, setup: LayerSetup,
    memory: PoolMemory, compact: CompactPool | None, buffers: ClusterBuffers | None,
    near: NearWork | None, shared: RepresentativeBuffer | None,
) -> LayerCache:  # fmt: skip
    if config.exact or not policy.retrieves:
        return LayerCache(i, setup, memory)
    request = _index_request(i, config, setup.plan, setup.shape, setup.rows_per_sequence)
    if shared is not None:
        request = replace(request, centroids=shared.vectors)
    index = policy.make_index(request)
    if isinstance(index.core, FollowedClusters):
        layout = _make_layout(i, config, policy, setup, index.core)
        ahead = None
        if shared is not None and isinstance(policy, DynaKV):
            number = (policy.files_per_layer - 1) * config.shape.num_layers + i
            file = RepresentativeFile(setup.store.region(number).file, shared)
            ahead = LayerRepresentatives(i, file, index.core, setup)
        return ClusterLayer(i, setup, memory, policy, index, layout, buffers, ahead)
    if isinstance(index.core, NearIndex):
        assert isinstance(policy, HillInfer)
        assert near is not None
        return NearLayer(i, setup, memory, policy, index, near)
    return RetrievalLayer(i, setup, memory, policy, index, compact)


def _chain(layers: list[AnyLayer]) -> None:
    """Let each layer fill the slots of the next one while it attends; the last, those of the first
    one for the next step, where they are not its own."""
    for i, layer in enumerate(layers):
        following = layers[(i + 1) % len(layers)]
        assert isinstance(layer, ClusterLayer)
        assert isinstance(following, ClusterLayer)
        if i + 1 < len(layers) or len(layers) % 2 == 0:
            layer.following_layer = following
        former = layers[i - 2 if i >= 2 else (len(layers) - 1 - i) // 2 * 2 + i]
        assert isinstance(former, ClusterLayer)
        layer.former_layer = None if former is layer else former


def _read_ahead(layers: list[AnyLayer]) -> None:
    """Let each layer ask for the representatives of the next one; the last, for those of the first
    one for the next step."""
    found = [layer.representatives for layer in layers if isinstance(layer, ClusterLayer)]
    for i, one in enumerate(found):
        if one is not None:
            one.reads_ahead = found[(i + 1) % len(found)]


def _representative_buffers(
    policy: SelectionPolicy, setup: LayerSetup
) -> list[RepresentativeBuffer]:
    """Memory that layers in turn have their representatives in; none where each has its own."""
    if not isinstance(policy, DynaKV) or policy.representatives != "flash":
        return []
    shape, plan = setup.shape, setup.plan
    capacity = policy.cluster_sizes.capacity(plan.max_groups)
    size = (plan.batch, capacity, shape.head_dim, setup.store.region(0).file.sector_bytes)
    count = min(SHARED_BUFFERS, shape.num_layers)
    return [RepresentativeBuffer(*size) for _ in range(count)]


def _near_work(
    config: RuntimeConfig, policy: SelectionPolicy, setup: LayerSetup
) -> NearWork | None:
    if not isinstance(policy, HillInfer) or config.exact:
        return None
    plan, layers = setup.plan, config.shape.num_layers
    fixed = policy.hot_tokens
    if isinstance(setup.store, NearStore):
        scorer: Scorer = setup.store.scorer
    else:
        fixed = fixed or plan.num_slots  # nobody works beside this process
        settings = policy.score_settings(_index_request(0, config, plan, setup.shape, 1))
        scorer = LocalScorer(settings, layers)
    return NearWork(
        scorer, layers=layers, most_hot=plan.num_slots, least_hot=plan.selected_groups, fixed=fixed
    )


def _cluster_buffers(policy: SelectionPolicy, setup: LayerSetup) -> ClusterBuffers | None:
    if not isinstance(policy, DynaKV) or not policy.lays_out or setup.staging is not None:
        return None
    size = policy.read_bytes(setup.shape, setup.plan.batch, setup.plan.selected_groups)
    return ClusterBuffers(size, setup.store.region(0).file.sector_bytes)


def _make_layout(
    i: int, config: RuntimeConfig, policy: SelectionPolicy, setup: LayerSetup,
    index: FollowedClusters,
) -> ClusterLayout | None:  # fmt: skip
    if not policy.lays_out:
        return None
    assert isinstance(policy, DynaKV)
    assert policy.write_buffers is not None, "plan() makes the choices"
    region = setup.store.region(config.shape.num_layers + i)
    file = PooledClusters(
        region.file, setup.shape.token_bytes, num_buffers=policy.write_buffers,
        gap_bytes=policy.gap_bytes,
    )  # fmt: skip
    capacity = policy.cluster_sizes.capacity(setup.plan.max_groups)
    return ClusterLayout(
        file, index, rows=setup.plan.batch, max_tokens=setup.plan.max_groups, capacity=capacity
    )
