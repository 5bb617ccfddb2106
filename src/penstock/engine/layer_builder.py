"""LayerBuilder: what a policy makes its layers of."""

from functools import cached_property

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.compact_pool import CompactPool
from penstock.engine.layer_cache import LayerSetup
from penstock.engine.policy import IndexRequest, SelectionPolicy
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.slot_transfer import PoolMemory


def index_request(
    i: int, settings: RuntimeSettings, plan: SlotPlan, shape: KVShape, rows_per_sequence: int
) -> IndexRequest:
    """What a policy is given to make layer i's index. shape: of a row."""
    return IndexRequest(
        shape=shape, batch=plan.batch, max_units=plan.max_units, group_tokens=plan.group_tokens,
        scaling=settings.logit_scaling,
        adapter=None if settings.adapter is None else settings.adapter[i], device=settings.device,
        score_tokens=plan.score_tokens, selected_units=plan.selected_units,
        rows_per_sequence=rows_per_sequence, rotary=settings.rotary,
        rotation=None if settings.rotations is None else settings.rotations[i],
    )  # fmt: skip


class LayerBuilder:
    """The memory, the store and the requests of the layers that retrieve.

    Attributes:
        setup: what all layers share
        numbers: the layers to make, in order
        num_layers: of the cache, those that are kept whole included
    """

    def __init__(self, settings: RuntimeSettings, setup: LayerSetup, numbers: range) -> None:
        self.setup, self.numbers, self.num_layers = setup, numbers, settings.shape.num_layers
        self._settings = settings
        self._pools: dict[int, PoolMemory] = {}

    def pool(self, i: int) -> PoolMemory:
        """Slots, sinks and window of layer i: its own, or what it shares.

        A fetch begins one layer ahead: neighbours that share take turns with two pools. Layers that
        are further apart need one.
        """
        plan = self.setup.plan
        key = i
        if plan.shares(i):
            key = -1 - (i - self.numbers.start) % 2 if plan.shared_pools else -1
        if key not in self._pools:
            self._pools[key] = self._allocate(plan)
            self.setup.workspace.may_lend(self._pools[key])
        return self._pools[key]

    def _allocate(self, plan: SlotPlan) -> PoolMemory:
        setup = self.setup
        if plan.coded_bytes is not None:
            return PoolMemory.allocate_coded(
                plan.batch * plan.num_slots, plan.coded_bytes, setup.shape
            )
        return PoolMemory.allocate(
            plan.batch * (plan.num_slots + plan.kept_slots), plan.unit_bytes,
            setup.store.padded_bytes, setup.device,
        )  # fmt: skip

    @cached_property
    def compact(self) -> CompactPool | None:
        """Memory that selections are gathered in, where the plan says so; layers share it."""
        return CompactPool(self.setup) if self.setup.plan.compact else None

    def index_request(self, i: int) -> IndexRequest:
        """What layer i's index is made from."""
        setup = self.setup
        return index_request(i, self._settings, setup.plan, setup.shape, setup.rows_per_sequence)

    def retrieval_layer(self, i: int, policy: SelectionPolicy) -> RetrievalLayer:
        """The layer of every policy that supplies no other."""
        index = policy.make_index(self.index_request(i))
        return RetrievalLayer(i, self.setup, self.pool(i), policy, index, self.compact)
