"""Candidates: KVSwap's settings that fit a budget, with what each is expected to do in a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.core.errors import BudgetError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.head_rows import HeadRows
from penstock.engine.policy import SelectionPolicy
from penstock.methods.kvswap.policy import PAPER_SELECTED_TOKENS, KVSwap
from penstock.methods.search_space import settings_of
from penstock.tuner.block_profile import Work, work_of
from penstock.tuner.fetch_survey import FetchSetting
from penstock.tuner.lookup_tables import LookupTables
from penstock.tuner.step_work import missing_by_factor


class Tables(Protocol):
    """What does not depend on the machine (appendix A.1)."""

    def reuse_rate(self, group_tokens: int, selected_tokens: int, capacity_tokens: int) -> float:
        """Share of a selection that so large a reuse buffer holds."""

    def kl(self, policy: KVSwap) -> float | None:
        """Mean KL divergence from full attention, in nats; None: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The model and the machine, as far as a plan depends on them."""

    shape: KVShape
    sector_bytes: int
    device_is_cpu: bool
    has_adapter: bool
    predictor_bytes: int
    """Copies of the predicting weights (`SlotPlan.with_predictor`)."""
    true_query_layers: frozenset[int]
    most_rank: int = 1 << 30
    """Components that the adapter has."""
    widest_ranks: tuple[int, ...] = ()
    """See `SizingRequest`."""

    def request(
        self, policy: SelectionPolicy, *, batch: int, max_tokens: int, limit_bytes: int | None
    ) -> SizingRequest:
        """What the policy is asked to divide."""
        rows = HeadRows(self.shape, per_head=policy.per_head)
        return SizingRequest(
            shape=rows.shape, batch=batch * rows.per_sequence, max_tokens=max_tokens,
            limit_bytes=limit_bytes, sector_bytes=self.sector_bytes,
            device_is_cpu=self.device_is_cpu, has_adapter=self.has_adapter,
            rows_per_sequence=rows.per_sequence, widest_ranks=self.widest_ranks,
        )  # fmt: skip

    def plan(
        self, policy: SelectionPolicy, request: SizingRequest
    ) -> tuple[SelectionPolicy, SlotPlan]:
        """As the engine would divide it.

        Raises:
            BudgetError: the budget is too small for this setting.
        """
        chosen, plan = policy.plan(request)
        if policy.predicts:
            plan = plan.with_predictor(self.predictor_bytes, request.limit_bytes)
        return chosen, plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A setting with every choice made, in one (batch, context, budget)."""

    policy: KVSwap
    plan: SlotPlan = field(repr=False)
    work: Work = field(repr=False)
    kl: float | None

    @property
    def resident_bytes(self) -> int:
        """Memory of the cache."""
        return self.plan.total_bytes

    @property
    def selected_tokens(self) -> int:
        """The paper's MG."""
        return self.plan.selected_units * self.plan.group_tokens

    @property
    def capacity_tokens(self) -> int:
        """The paper's C in tokens; 0 without reuse."""
        return 0 if self.plan.shared_pools else self.plan.num_slots * self.plan.group_tokens

    @property
    def choice(self) -> FetchSetting:
        """What decides which units it fetches."""
        plan = self.plan
        slots = 0 if plan.shared_pools else plan.num_slots
        return FetchSetting(
            plan.group_tokens, plan.selected_units, slots, plan.shared_every if slots else 0
        )


def candidates(
    seat: Seat, tables: Tables, *, batch: int, context: int, max_tokens: int,
    limit_bytes: int | None, settings: Sequence[KVSwap] | None = None,
) -> tuple[list[Candidate], int | None]:  # fmt: skip
    """Every setting that fits, once.

    Args:
        max_tokens: what caches are planned for, at least `context`.
        settings: in place of all of `KVSwap.choices`.

    Returns:
        The candidates; and the least budget that any setting asked for (None: nothing was refused).
    """
    out: dict[KVSwap, Candidate] = {}
    least: int | None = None
    for setting in settings_of(KVSwap) if settings is None else settings:
        assert isinstance(setting, KVSwap)
        request = seat.request(setting, batch=batch, max_tokens=max_tokens, limit_bytes=limit_bytes)
        try:
            chosen, plan = seat.plan(setting, request)
        except BudgetError as error:
            needed = error.needed_bytes
            least = needed if least is None or (needed or least) < least else least
            continue
        assert isinstance(chosen, KVSwap)
        if plan.is_resident or (chosen.rank or 0) > seat.most_rank:
            continue
        key = _made_explicit(chosen, plan)
        if key not in out:
            out[key] = _candidate(seat, tables, key, plan, request, context)
    return list(out.values()), least


def _made_explicit(policy: KVSwap, plan: SlotPlan) -> KVSwap:
    """The same setting with what its plan decided as fields, so that it can be told from others."""
    reuse = 0 if plan.shared_pools else plan.num_slots * plan.group_tokens
    factor = policy.resident_factor(plan.selected_units)
    return replace(
        policy, reuse_tokens=reuse, selected_tokens=plan.selected_units * plan.group_tokens,
        shared_every=plan.shared_every if plan.shared_every > 1 else policy.shared_every,
        keep=policy.keep if factor == 1 else factor,
    )  # fmt: skip


def _candidate(
    seat: Seat, tables: Tables, policy: KVSwap, plan: SlotPlan, request: SizingRequest,
    context: int,
) -> Candidate:  # fmt: skip
    selected = plan.selected_units * plan.group_tokens
    capacity = 0 if plan.shared_pools else plan.num_slots * plan.group_tokens
    hits = tables.reuse_rate(plan.group_tokens, selected, capacity) if capacity else 0.0
    hits = 1 - (1 - hits) * missing_by_factor(policy.resident_factor(plan.selected_units))
    work = work_of(
        plan, rows_per_sequence=request.rows_per_sequence, num_layers=seat.shape.num_layers,
        context=context, hit_rate=hits,
        row_bytes=request.padded_bytes(plan.group_tokens), true_query_layers=seat.true_query_layers,
    )  # fmt: skip
    return Candidate(policy=policy, plan=plan, work=work, kl=tables.kl(policy))


def lighter_twin(candidate: Candidate, allowed: Sequence[Candidate]) -> Candidate:
    """The same setting with the smallest index rank of those allowed; itself if it has that.

    All that the twin does differently is to rank with less, so that it is not slower. A few runs
    do not show it: a rank of 64 instead of 32 is some 3 % of a step of the bundled model.
    """
    policy = candidate.policy
    same = [
        each for each in allowed
        if each.choice == candidate.choice and each.policy.index_bits == policy.index_bits
    ]  # fmt: skip
    return min([candidate, *same], key=lambda each: each.policy.rank or math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTables:
    """For models that were not calibrated: the paper's averages and limits.

    Source: KVSwap (arXiv 2511.11907): Table 5 (a buffer of one selection hits 77 %), section 4.3
    (sigma at most 32), section 5.1 (G of 4 and 8).
    """

    joint_dim: int
    overlap: float = 0.77
    sigma_max: float = 32.0
    group_max: int = 8

    def reuse_rate(self, group_tokens: int, selected_tokens: int, capacity_tokens: int) -> float:
        """See `Tables.reuse_rate`; what goes beyond one selection is taken to add nothing."""
        return self.overlap * min(1.0, capacity_tokens / max(1, selected_tokens))

    def kl(self, policy: KVSwap) -> float | None:
        """None within the paper's limits, infinite beyond them."""
        rank = policy.rank or self.joint_dim
        within = (
            self.joint_dim / rank <= self.sigma_max and policy.group_tokens <= self.group_max
            and (policy.selected_tokens or 0) >= PAPER_SELECTED_TOKENS // policy.group_tokens
            * policy.group_tokens
        )  # fmt: skip
        return None if within else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedTables:
    """`LookupTables` as a search asks them."""

    measured: LookupTables

    def reuse_rate(self, group_tokens: int, selected_tokens: int, capacity_tokens: int) -> float:
        """See `Tables.reuse_rate`."""
        return self.measured.reuse_rate(group_tokens, selected_tokens, capacity_tokens)

    def kl(self, policy: KVSwap) -> float | None:
        """See `Tables.kl`; of a setting with every choice made."""
        assert policy.rank is not None
        assert policy.index_bits is not None
        assert policy.selected_tokens is not None
        return self.measured.kl(
            policy.group_tokens, policy.selected_tokens, policy.rank, policy.index_bits
        )
