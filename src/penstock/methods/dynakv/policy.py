"""DynaKV: clusters that follow the decode, laid out for flash. Source: DynaKV, whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer import Layer
from penstock.engine.layer_builder import LayerBuilder
from penstock.engine.policy import IndexRequest, SelectionPolicy, StoreRequest
from penstock.engine.retrieval_policy import SELECTED, BaselinePolicy, IndexSize
from penstock.engine.sizing import largest_plan
from penstock.engine.tiers.replacement import ReplacementPolicy
from penstock.methods.dynakv.adaptive_clusters import AdaptiveClusters, UpdateRule
from penstock.methods.dynakv.index import ClusterSizes, FollowedClusters
from penstock.methods.dynakv.make_layers import SHARED_BUFFERS, make_cluster_layers
from penstock.methods.dynakv.replacement import UPDATED_SHARE, ClusterAligned
from penstock.methods.dynakv.representative_file import RepresentativeBuffer
from penstock.storage.store import KVStore

TOKENS_PER_CLUSTER = (16, 32, 64, 128)
"""Tokens of an initial cluster on average, best first."""
READ_FACTOR = 2
"""Memory for the clusters of a step, as a multiple of the tokens selected; beyond it they come in
several rounds."""
WRITE_BUFFERS = (64, 16)
"""Clusters of a layer with a write buffer, best first."""
UPDATES = ("adaptive", "static", "local")
LAYOUTS = ("clusters", "tokens")
REPRESENTATIVES = ("auto", "memory", "flash")


@dataclass(frozen=True, kw_only=True)
class DynaKV(BaselinePolicy):
    """Retrieval by clusters that are split as the output drifts away from them, per KV head.

    Source: "DynaKV: Adaptive KVCache Management for Long-Sequence Decoding on Smartphones",
    sections 4, 5 and 6. The prompt is clustered when the first step wants it; each new token joins
    the nearest cluster, or waits until that cluster is retrieved and split. Clusters lie in pools
    of two on the disk, those that the prompt's queries retrieved together side by side; slots are
    given up cluster by cluster.

    Differences: the paper names neither the size of a cluster, the thresholds nor a window; here 16
    tokens, a quantile of the prompt's own variances (`threshold_quantile`), and the sinks and the
    window that all methods of this engine have. Both pipelines of section 6.1 are options:
    `representatives` from flash where memory is short, and `virtual` slots. More is stated at the
    parts: `AdaptiveClusters`, `FollowedClusters`, `LayerRepresentatives`, `ClusterLayout`,
    `PooledClusters`, `ClusterAligned`.

    `update` and `layout` make the methods that the paper compares with on the same engine: `static`
    as it describes PQCache, `local` as ClusterKV, `tokens_per_cluster=1` retrieval without clusters
    (every key is its own representative), and `layout=tokens` for what lies in the order of tokens.
    """

    name: ClassVar[str] = "dynakv"
    per_head: ClassVar[bool] = True
    can_keep_whole: ClassVar[bool] = False

    tokens_per_cluster: int | None = None
    """Tokens of an initial cluster on average; None: 16, or more where the budget is tight."""
    update: UpdateRule = "adaptive"
    """How clusters take in what is decoded: "adaptive", "static" or "local"."""
    layout: str = "clusters"
    """"clusters": on the disk by cluster too; "tokens": in the order of tokens alone."""
    buffer_entries: int = 16
    """The paper's B_max: entries of a layer that may wait for the split of their cluster."""
    recluster_tokens: int = 320
    """Tokens that are clustered together with update=local."""
    threshold_quantile: float = 0.9
    """tau of a head: this quantile of the variances of its prompt's clusters, by their size."""
    threshold_factor: float = 1.0
    """Factor on tau."""
    updated_share: float = UPDATED_SHARE
    """Share of the slots that is kept for clusters that were appended to or split lately."""
    prefers_small: bool = True
    """Whether large clusters leave the slots first; false: the one wanted longest ago."""
    virtual: bool = False
    """Two pools of slots serve all layers, and while one layer attends, the next one's are filled
    with what they held when it was there last (section 6.1)."""
    representatives: str = "auto"
    """Where the clusters' centroids are: "memory", or "flash", from where each layer's are read
    behind the layer before, into memory that all layers share (section 6.1); "auto": on flash
    where the index would not fit otherwise."""
    gap_bytes: int = 0
    """Two clusters are read as one where at most so much lies between them."""
    write_buffers: int | None = None
    """Clusters of a layer whose last sector is kept in memory until it is full; None: 64, or 16
    where the budget is tight."""

    counters: ClassVar[tuple[str, ...]] = ("follow_s", "adapt_s")
    """Seconds behind the attention in which clusters took the output in and were laid out; of them,
    in the clusters themselves, without the disk."""
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("tokens_per_cluster", (None, 16, 32, 64, 128), "tokens of a cluster at first"),
        SELECTED,
    )

    @override
    def __post_init__(self) -> None:
        BaselinePolicy.__post_init__(self)
        for name, value, known in (
            ("update", self.update, UPDATES), ("layout", self.layout, LAYOUTS),
            ("representatives", self.representatives, REPRESENTATIVES),
        ):  # fmt: skip
            if value not in known:
                raise ConfigError(f"{name}={value} is none of {', '.join(known)}")
        if self.group_tokens != 1:
            raise ConfigError("group_tokens must be 1: clusters are made of single tokens")
        if self.tokens_per_cluster is not None and self.tokens_per_cluster < 1:
            raise ConfigError(f"tokens_per_cluster={self.tokens_per_cluster} must be at least 1")
        if self.buffer_entries < 1:
            raise ConfigError(f"buffer_entries={self.buffer_entries} must be at least 1")
        if self.recluster_tokens < (self.tokens_per_cluster or 1):
            raise ConfigError(
                f"recluster_tokens={self.recluster_tokens} must be at least "
                f"tokens_per_cluster={self.tokens_per_cluster}"
            )
        for name, share in (
            ("threshold_quantile", self.threshold_quantile), ("updated_share", self.updated_share),
        ):  # fmt: skip
            if not 0 <= share <= 1:
                raise ConfigError(f"{name}={share} must be from 0 to 1")
        if min(self.threshold_factor, self.gap_bytes, self.write_buffers or 0) < 0:
            raise ConfigError("threshold_factor, gap_bytes and write_buffers must not be negative")
        if self.virtual and self.layout != "clusters":
            raise ConfigError("virtual=true reads clusters ahead: give layout=clusters")
        if self.update == "local" and self.layout == "clusters":
            raise ConfigError("update=local clusters the newest tokens anew: give layout=tokens")
        if self.update == "local" and self.representatives == "flash":
            raise ConfigError(
                "update=local makes many clusters at once: give representatives=memory"
            )

    @property
    def has_cluster_layout(self) -> bool:
        """Whether tokens are on the disk by cluster too, in a second file of each layer."""
        return self.layout == "clusters"

    @property
    def files_per_layer(self) -> int:
        """Files of the store: tokens in their order, clusters, and the clusters' centroids."""
        return 1 + self.has_cluster_layout + (self.representatives != "memory")

    # Memory -----------------------------------------------------------------------------------

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        """Clusters grow where the budget is tight."""
        out: list[tuple[SelectionPolicy, IndexSize]] = []
        wanted: tuple[int, ...] = TOKENS_PER_CLUSTER
        if self.tokens_per_cluster is not None:
            wanted = (self.tokens_per_cluster,)
        places: tuple[str, ...] = (self.representatives,)
        if self.representatives == "auto":
            places = ("memory",) if self.update == "local" else ("memory", "flash")
        buffers = WRITE_BUFFERS if self.write_buffers is None else (self.write_buffers,)
        for tokens, place, count in product(wanted, places, buffers):
            if self.update != "local" or tokens <= self.recluster_tokens:
                policy = replace(
                    self, tokens_per_cluster=tokens, representatives=place, write_buffers=count
                )
                out.append((policy, policy._size(request)))
        return out

    def _size(self, request: SizingRequest) -> IndexSize:
        shape, sizes = request.shape, self.cluster_sizes
        size = {"batch": request.batch, "max_tokens": request.max_tokens}
        held = FollowedClusters.num_bytes(shape, sizes, **size)
        held += 4 * request.batch * sizes.capacity(request.max_tokens)  # when each was updated
        scratch = FollowedClusters.scratch_bytes(shape, sizes, **size)
        shared = self.representative_bytes(request) if sizes.on_flash else 0
        fit = request.max_tokens * shape.token_bytes + AdaptiveClusters.scratch_bytes(
            dim=shape.head_dim, tokens=request.max_tokens,
            tokens_per_cluster=sizes.tokens_per_cluster,
        )  # fmt: skip
        if self.has_cluster_layout:
            held += self.layout_bytes(request)
        return IndexSize(held, max(scratch, fit) + shared)

    def representative_bytes(self, request: SizingRequest) -> int:
        """Bytes of the buffers that all layers' representatives pass through."""
        shape, capacity = request.shape, self.cluster_sizes.capacity(request.max_tokens)
        return min(SHARED_BUFFERS, shape.num_layers) * RepresentativeBuffer.num_bytes(
            request.batch, capacity, shape.head_dim, request.sector_bytes
        )

    @property
    @override
    def _sharing(self) -> tuple[bool, ...]:
        return (True,) if self.virtual else super()._sharing

    @override
    def _grow(
        self, request: SizingRequest, size: IndexSize, selected: int, *, shared: bool
    ) -> SlotPlan:
        if not (shared and self.virtual):
            return super()._grow(request, size, selected, shared=shared)
        most = min(request.max_tokens, max(selected, self.reuse_tokens or 0))
        return largest_plan(
            request, lambda slots: self._build(request, size, selected, slots, shared=True),
            selected, most,
        )  # fmt: skip

    @override
    def _build(
        self, request: SizingRequest, size: IndexSize, selected: int, num_slots: int, *,
        shared: bool,
    ) -> SlotPlan:  # fmt: skip
        held, scratch = size
        held += ClusterAligned.num_bytes(request.batch, num_slots)
        scratch += ClusterAligned.scratch_bytes(request.batch, num_slots)
        if self.has_cluster_layout and request.is_direct(1):
            scratch += 2 * self.read_bytes(request.shape, request.batch, selected)
        return super()._build(request, IndexSize(held, scratch), selected, num_slots, shared=shared)

    @staticmethod
    def read_bytes(shape: KVShape, rows: int, selected: int) -> int:
        """Bytes that the clusters of one step land in: they are read whole, in whole sectors."""
        return rows * selected * shape.token_bytes * READ_FACTOR

    def layout_bytes(self, request: SizingRequest) -> int:
        """Bytes of one layer's layout in memory."""
        waiting = (self.buffer_entries + request.batch) * request.shape.token_bytes
        geometry = 24 * request.batch * self.cluster_sizes.capacity(request.max_tokens)
        place_bytes = 2 if request.max_tokens <= 1 << 16 else 4
        tables = place_bytes * request.batch * request.max_tokens
        assert self.write_buffers is not None, "plan() makes the choices"
        return tables + waiting + geometry + self.write_buffers * request.sector_bytes

    @property
    def cluster_sizes(self) -> ClusterSizes:
        """Sizes of a layer's clusters, once `plan` has made the choices."""
        assert self.tokens_per_cluster is not None, "plan() makes the choices"
        return ClusterSizes(
            tokens_per_cluster=self.tokens_per_cluster, update=self.update,
            buffer_entries=self.buffer_entries, recluster_tokens=self.recluster_tokens,
            threshold_quantile=self.threshold_quantile, threshold_factor=self.threshold_factor,
            on_flash=self.representatives == "flash",
        )  # fmt: skip

    # Selection --------------------------------------------------------------------------------

    @override
    def open_store(self, request: StoreRequest) -> KVStore:
        return request.create(self.files_per_layer)

    @override
    def make_layers(self, builder: LayerBuilder) -> Sequence[Layer]:
        return make_cluster_layers(self, builder)

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return FollowedClusters(
            request.shape, self.cluster_sizes, batch=request.batch,
            max_tokens=request.max_units, scaling=request.scaling, centroids=request.shared,
        )  # fmt: skip

    @override
    def make_replacement(self, batch: int, num_slots: int) -> ReplacementPolicy:
        return ClusterAligned(
            batch, num_slots, updated_share=self.updated_share, prefers_small=self.prefers_small
        )

    @override
    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        assert isinstance(index, FollowedClusters), "dynakv ranks clusters"
        if index.score_is_replaced:
            index.whole.fill(False)  # single tokens are ranked
            return super().select(index, query, first_unit, end_unit, wanted)
        return index.retrieve(query, first_unit, end_unit, wanted)
