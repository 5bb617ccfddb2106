"""StepWork: what one decode step of a policy reads, scans and attends to, from its memory plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.policy import SelectionPolicy
from penstock.methods import POLICIES
from penstock.methods.baselines.shadowkv import ShadowKV
from penstock.methods.kvswap.policy import KVSwap

PAPER_REUSE_RATE = 0.77
"""Share of a selection that is in the reuse buffer (KVSwap, Table 5: 76.2 to 77.6 % on average)."""
SCORE_PASSES = 4
"""Times that 16-bit scores of all tokens go through memory: written, softmax in and out, summed."""
STREAM_READ_BYTES = 1 << 20
"""A policy that reads everything does so in requests of this size."""
PREDICTABLE: Mapping[str, bool] = MappingProxyType(
    {
        "kvswap": True,
        "infinigen-star-reuse": True,
        "shadowkv": False,
        "infinigen-star": True,
        "infinigen": True,
        "loki": True,
        "flexgen": True,
        "full": False,
    }
)
"""Policies that have a cost model, and whether reads go on behind the layer before: ShadowKV
selects with the layer's own query and waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """One layer and one sequence of a decode step."""

    reads: float
    """Requests to the disk."""
    request_bytes: int
    """Of each."""
    attended_tokens: int
    scanned_bytes: float
    """Index and scores, through memory before the reads can start."""
    rebuild_flops: float = 0.0
    """Operations that make keys again from low rank."""
    is_prefetched: bool
    """Reads go on behind the layer before."""
    selects: bool
    """The host waits for a selection in every layer."""
    reused_units: float
    """Units that are looked up in a reuse buffer; 0: nothing is kept from step to step."""


def make_policy(name: str, group_tokens: int | None = None) -> SelectionPolicy:
    """A policy that has a cost model, with its own defaults.

    Raises:
        ConfigError: it has none; or the group size is impossible.
    """
    if name not in PREDICTABLE:
        raise ConfigError(
            f"policy {name} cannot be predicted; choose from {', '.join(PREDICTABLE)}"
        )
    if group_tokens is not None and name == KVSwap.name:
        return KVSwap(group_tokens=group_tokens)
    return POLICIES[name]()


def work_of(
    policy: SelectionPolicy, plan: SlotPlan, shape: KVShape, *, context: int, reuse_rate: float
) -> StepWork:
    """What a layer and sequence does in one step.

    Args:
        policy, plan: as `SelectionPolicy.plan` returned them.
        shape: of the model, all heads.
        context: tokens of a sequence.
        reuse_rate: hits of a reuse buffer that holds one selection.
    """
    if plan.is_resident or not policy.retrieves:
        resident = plan.is_resident
        return StepWork(
            reads=0 if resident else context * shape.token_bytes / STREAM_READ_BYTES,
            request_bytes=0 if resident else STREAM_READ_BYTES,
            attended_tokens=context, scanned_bytes=0.0, is_prefetched=True, selects=False,
            reused_units=0,
        )  # fmt: skip
    rows = shape.num_kv_heads if policy.per_head else 1
    chunk_units = (policy.landmark_units or 1) if isinstance(policy, ShadowKV) else 1
    # A larger buffer misses less in proportion, or still less (research/notes, 2026-11-26).
    missing = (1.0 - reuse_rate) * min(1.0, plan.selected_units / plan.num_slots)
    missing *= missing_by_factor(policy.resident_factor(plan.selected_units))
    sharing = plan.sharing(shape.num_layers)
    missing = sharing + (1.0 - sharing) * missing
    slots = plan.selected_units
    if isinstance(policy, KVSwap) and policy.attend == "resident":
        slots = plan.num_slots
    attended = min(context, (slots + plan.kept_slots) * plan.group_tokens)
    scored = (
        context / (plan.group_tokens * chunk_units) if isinstance(policy, ShadowKV) else context
    )
    index_bytes = plan.index_bytes * rows / (shape.num_layers * plan.batch)
    rebuild = 0.0
    if isinstance(policy, ShadowKV):
        index_bytes = scored * shape.joint_dim * shape.dtype.itemsize
        rebuild = 2.0 * (policy.rank or 0) * shape.joint_dim * attended
    return StepWork(
        reads=plan.selected_units * rows * missing / chunk_units,
        request_bytes=plan.unit_bytes * chunk_units,
        attended_tokens=attended,
        scanned_bytes=index_bytes
        + SCORE_PASSES * shape.num_query_heads * scored * shape.dtype.itemsize,
        rebuild_flops=rebuild,
        is_prefetched=PREDICTABLE[policy.name],
        selects=True,
        reused_units=(1.0 - sharing) * plan.selected_units * rows,
    )


def missing_by_factor(factor: float) -> float:
    """Of what the slots would miss of a selection of their size, what they do with a factor on the
    scores of those that are there (research/notes/2026-11-26-which-slots-stay.md)."""
    return float(factor**-0.75)
