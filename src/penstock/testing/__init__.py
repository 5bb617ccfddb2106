"""Contracts and doubles for tests of what others build on Penstock; pytest is loaded when used."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.testing.policy_contract import PolicyContract

__all__ = ["PolicyContract"]


def __getattr__(name: str) -> object:
    if name != "PolicyContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.testing.policy_contract import PolicyContract

    return PolicyContract
