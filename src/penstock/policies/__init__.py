"""POLICIES, the table of methods: one file per method, one method per file."""

from penstock.policies.base import SelectionPolicy
from penstock.policies.baselines.flexgen import FlexGen
from penstock.policies.baselines.full import Full
from penstock.policies.baselines.quest import Quest
from penstock.policies.kvswap import KVSwap

POLICIES: dict[str, type[SelectionPolicy]] = {
    "kvswap": KVSwap,
    "full": Full,
    "flexgen": FlexGen,
    "quest": Quest,
}
"""Every method by the name that the command line uses."""

__all__ = ["POLICIES", "FlexGen", "Full", "KVSwap", "Quest", "SelectionPolicy"]
