"""add_advice(): what else would do where a budget is too small: an adapter, or another policy."""

from dataclasses import replace

from penstock.core.errors import BudgetError
from penstock.engine.planning import fits, least_bytes_with_adapter
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.methods import POLICIES

_SECTOR_BYTES = 4096
"""Of the worst disk: what is advised holds for the others too."""


def add_advice(error: BudgetError, config: RuntimeSettings, batch: int) -> None:
    """Note in an error which policies the budget would do for, and what an adapter would save.

    Only policies that forget nothing and run on the same tiers are looked at.

    Args:
        config: of the cache that was refused.
        batch: its sequences.
    """
    if config.exact or config.past is not None:
        return
    wanted = config.policy
    error.fitting = tuple(
        name for name, policy in POLICIES.items()
        if not (policy.drops or policy.stays_resident or name == wanted.name)
        and policy.device_tier >= config.device_tier
        and fits(replace(config, policy=policy(), adapter=None), batch, sector_bytes=_SECTOR_BYTES)
    )  # fmt: skip
    if wanted.uses_adapter and config.adapter is None:
        least = least_bytes_with_adapter(config, batch, sector_bytes=_SECTOR_BYTES)
        if least is not None and error.needed_bytes is not None and least < error.needed_bytes:
            error.adapter_bytes = least
