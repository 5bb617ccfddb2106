"""Every policy of POLICIES through every invariant of the design."""

from typing import ClassVar

import pytest

from penstock.methods import POLICIES, KVSwap, SelectionPolicy
from penstock.methods.hillinfer.policy import HillInfer
from penstock.testing import PolicyContract

UNSEEN_NEEDLES = {
    ("streaming_llm", "attended"): "keeps sinks and the newest tokens, whatever was attended to",
    ("streaming_llm", "unattended"): "keeps sinks and the newest tokens, whatever is asked later",
    ("snapkv", "unattended"): "the prompt's last queries chose before the needle was asked for",
    ("h2o", "unattended"): "no attention had accumulated when the cut was made",
    ("raas", "unattended"): "the needle's stamp was its birth when the cut was made",
}


class TestPolicies(PolicyContract):
    policies: ClassVar[tuple[SelectionPolicy, ...]] = tuple(
        policy()
        for name, policy in POLICIES.items()
        if not policy.drops and name not in ("hillinfer", "infinigen-star")
    )

    # What is found unattended is found where the prompt has looked for it.
    @pytest.mark.parametrize("scenario", ["unattended", "recent"])
    def test_a_needle_is_found_at_a_tenth(self, policy: SelectionPolicy, scenario: str) -> None:
        super().test_a_needle_is_found_at_a_tenth(policy, scenario)


class TestPoliciesThatDrop(PolicyContract):
    policies: ClassVar[tuple[SelectionPolicy, ...]] = tuple(
        policy() for policy in POLICIES.values() if policy.drops
    )
    unseen = UNSEEN_NEEDLES


class TestInfiniGenStar(PolicyContract):
    policies = (POLICIES["infinigen-star"](),)

    # It selects as infinigen-star-reuse does, and keeps what infinigen keeps.
    test_exact_is_the_plain_model = None  # type: ignore[assignment]
    test_it_goes_on_after_a_failed_read = None  # type: ignore[assignment]
    test_crop_reorder_and_reset_leave_a_usable_cache = None  # type: ignore[assignment]
    test_the_ledger_agrees_with_what_is_allocated = None  # type: ignore[assignment]


class TestSlotsIn8Bits(PolicyContract):
    policies = (KVSwap(slot_bits=8, shared_every=2),)

    # The device tier refuses them.
    test_units_partition_the_past = None  # type: ignore[assignment]


class TestHillInfer(PolicyContract):
    policies = (HillInfer(near=False), HillInfer(near=False, host_memory="64MiB"))

    # What is selected is hot: with everything selected, decode steps read nothing.
    test_it_goes_on_after_a_failed_read = None  # type: ignore[assignment]


class TestHillInferOnDevices(PolicyContract):
    policies = (HillInfer(),)

    # Processes are slow to start, and these differ in nothing that a device does.
    test_it_goes_on_after_a_failed_read = None  # type: ignore[assignment]
    test_exact_is_the_plain_model = None  # type: ignore[assignment]
    test_crop_reorder_and_reset_leave_a_usable_cache = None  # type: ignore[assignment]
    test_a_row_answers_as_it_does_alone = None  # type: ignore[assignment]
    test_the_ledger_agrees_with_what_is_allocated = None  # type: ignore[assignment]

    @pytest.mark.parametrize("scenario", ["unattended"])
    def test_a_needle_is_found_at_a_tenth(self, policy: SelectionPolicy, scenario: str) -> None:
        super().test_a_needle_is_found_at_a_tenth(policy, scenario)


def test_the_table_names_policies_that_drop() -> None:
    dropping = {name for name, policy in POLICIES.items() if policy.drops}
    assert {name for name, _ in UNSEEN_NEEDLES} == dropping


KINDS: tuple[type[PolicyContract], ...] = (
    TestPolicies, TestPoliciesThatDrop, TestInfiniGenStar, TestHillInfer,
)  # fmt: skip


def test_every_policy_is_tested() -> None:
    tested = {policy.name for kind in KINDS for policy in kind.policies}
    assert tested == set(POLICIES)
