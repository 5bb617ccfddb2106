"""What the arguments of a TieredCache mean: policy, budget, and which tier serves it."""

import psutil
import torch

from penstock.core.byte_size import parse_memory
from penstock.core.errors import ConfigError
from penstock.indexes.adapter import LowRankAdapter
from penstock.policies import POLICIES, SelectionPolicy


def named_policy(policy: str | SelectionPolicy) -> SelectionPolicy:
    """The policy of a name.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(policy, SelectionPolicy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"there is no policy {policy!r}; choose from {', '.join(POLICIES)}")
    return POLICIES[policy]()


def serves_device_tier(
    store: str, policy: SelectionPolicy, device: torch.device, *, exact: bool
) -> bool:
    """Whether the device tier serves this cache.

    Raises:
        ConfigError: it was asked for and the policy cannot.
    """
    able = policy.device_tier or exact
    if store == "host":
        if not able and not policy.stays_resident:
            known = ", ".join(name for name, each in POLICIES.items() if each.device_tier)
            raise ConfigError(
                f"store=host is for {known}; give {policy.name} a store on disk, or memory"
            )
        if getattr(policy, "reuse_tokens", None) == 0:
            raise ConfigError("reuse_tokens=0 is for stores on disk: here every layer has slots")
        return True
    return store == "memory" and device.type == "cuda" and able


def true_query_layers(policy: SelectionPolicy, adapter: LowRankAdapter | None) -> frozenset[int]:
    """Tiered layers whose query calibration found not worth predicting."""
    cosines = () if adapter is None else adapter.prediction_cosine
    return frozenset(i for i, c in enumerate(cosines) if not policy.trusts_prediction(c))


def limit_bytes(
    memory: int | float | str | None, full_bytes: int, device: torch.device
) -> int | None:
    """The budget that a user's `memory` means, in bytes.

    Raises:
        ConfigError: it means nothing.
    """
    if memory is None:
        return None
    limit = parse_memory(memory, full_bytes, free_bytes(device))
    # A share of one, and "auto" with memory to spare, mean everything: the full cache's mask
    # comes on top of its keys and values.
    whole = not isinstance(memory, int) and limit == full_bytes
    return limit + full_bytes // 64 + 4096 if whole else limit


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
