"""A folder for each method, and one for those that they compare with.

The names are loaded when they are first used: a near-storage device, which is a process of a module
far below, starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.policy import SelectionPolicy
    from penstock.methods.baselines.flexgen import FlexGen
    from penstock.methods.baselines.full import Full
    from penstock.methods.baselines.quest import Quest
    from penstock.methods.kvswap.policy import KVSwap
    from penstock.methods.policies import POLICIES

__all__ = ["POLICIES", "FlexGen", "Full", "KVSwap", "Quest", "SelectionPolicy"]

_HOMES = {
    "POLICIES": "penstock.methods.policies",
    "FlexGen": "penstock.methods.baselines.flexgen",
    "Full": "penstock.methods.baselines.full",
    "KVSwap": "penstock.methods.kvswap.policy",
    "Quest": "penstock.methods.baselines.quest",
    "SelectionPolicy": "penstock.engine.policy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
