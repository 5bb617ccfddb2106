"""PolicyContract: a policy with a defect fails the check that is about it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

import penstock.testing
from penstock.core.errors import BudgetError
from penstock.core.selection import Selection
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy
from penstock.methods import Quest
from penstock.testing import PolicyContract


@dataclass(frozen=True, kw_only=True)
class Forgets(Quest):
    """Leaves the last unit out of what it is asked for."""

    @override
    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        found = super().select(index, query, first_unit, end_unit, wanted)
        valid = np.ones(found.unit_ids.shape, dtype=np.bool_)
        valid[:, -1] = False
        return Selection(found.unit_ids, valid)


@dataclass(frozen=True, kw_only=True)
class Backwards(Quest):
    """Prefers what agrees least."""

    @override
    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        return -super().score(summary, query)


@dataclass(frozen=True, kw_only=True)
class Mixes(Quest):
    """Scores a row by the keys of all."""

    @override
    def score(self, summary: tuple[Tensor, ...], query: Tensor) -> Tensor:
        return super().score(summary, query).sum(dim=0, keepdim=True).expand(len(query), -1, -1, -1)


@dataclass(frozen=True, kw_only=True)
class Hoards(Quest):
    """Holds memory that it does not book."""

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        index = super().make_index(request)
        vars(index)["hoard"] = torch.zeros(1 << 20)
        return index


@dataclass(frozen=True, kw_only=True)
class Boasts(Quest):
    """Books an index twice as large as it is."""

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        policy, plan = super().plan(request)
        return policy, replace(plan, index_bytes=2 * plan.index_bytes)


@dataclass(frozen=True, kw_only=True)
class Understates(Quest):
    """Names a budget that would not do."""

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        try:
            return super().plan(request)
        except BudgetError as error:
            raise BudgetError("too little", needed_bytes=(error.needed_bytes or 0) - 1) from error


CHECKS: dict[str, tuple[Quest, type[Exception], str]] = {
    "test_units_partition_the_past": (Forgets(), AssertionError, "missing or is attended to twice"),
    "test_it_goes_on_after_a_failed_read": (Forgets(), AssertionError, "missing or is attended"),
    "test_a_needle_is_found_at_a_tenth": (Backwards(), AssertionError, "the answer is off by"),
    "test_a_row_answers_as_it_does_alone": (Mixes(), AssertionError, "than alone|logits are off"),
    "test_the_ledger_agrees_with_what_is_allocated": (
        Hoards(), AssertionError, "allocated, and .*booked",
    ),
    "test_the_budget_is_a_promise_and_the_policy_stays_as_it_was": (
        Understates(), BudgetError, "too little",
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_a_defect_is_seen(check: str) -> None:
    policy, error, words = CHECKS[check]
    scenario = {"scenario": "attended"} if "needle" in check else {}
    with pytest.raises(error, match=words):
        getattr(PolicyContract(), check)(policy, **scenario)
    getattr(PolicyContract(), check)(Quest(), **scenario)


def test_memory_that_is_booked_and_not_there_is_seen() -> None:
    with pytest.raises(AssertionError, match="booked to last"):
        PolicyContract().test_the_ledger_agrees_with_what_is_allocated(Boasts())


def test_a_full_budget_that_forgets_is_seen() -> None:
    with pytest.raises(AssertionError, match="a full budget: "):
        PolicyContract().test_a_full_budget_is_full_attention(Forgets(), "llama")


def test_a_contract_without_policies_is_refused() -> None:
    with pytest.raises(AssertionError, match="PolicyContract: say which policies are tested"):
        PolicyContract().pytest_generate_tests(None)  # type: ignore[arg-type]


def test_the_package_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'StoreContract'"):
        penstock.testing.StoreContract  # noqa: B018
