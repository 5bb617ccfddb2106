"""open_store(): where the full KV of a cache goes, as its policy wants it."""

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.near_storage.near_store import NearStore
from penstock.policies.dynakv import DynaKV
from penstock.policies.hillinfer import HillInfer
from penstock.runtime.runtime_config import RuntimeConfig
from penstock.runtime.stored_past import overlay_store
from penstock.storage.store import KVStore


def open_store(config: RuntimeConfig, shape: KVShape, unit_tokens: int, batch: int) -> KVStore:
    """Open the store of a cache; HillInfer's is behind near-storage devices.

    Args:
        shape: of a row.
        unit_tokens: tokens of a unit.
        batch: sequences that the cache is planned for.

    Raises:
        ConfigError: the location makes no sense.
        StorageError: it cannot be used, or a near-storage device does not start.
    """
    policy = config.policy
    if isinstance(policy, HillInfer) and policy.near and not config.exact:
        if config.sealed is True:
            raise ConfigError(
                "near-storage devices keep the cache in the open; take hillinfer with near=False, "
                "or another policy"
            )
        return NearStore.open(
            config.store,
            policy.settings_for(shape, batch, config.max_tokens, config.logit_scaling),
            layers=shape.num_layers, unit_bytes=shape.token_bytes, devices=policy.devices,
            timeout_s=policy.timeout_s,
        )  # fmt: skip
    if config.past is not None and config.shares_past:
        own = KVStore.create(
            config.store, num_layers=shape.num_layers, unit_bytes=config.past.row_bytes,
            sealed=config.sealed,
        )  # fmt: skip
        return overlay_store(config.past, own)
    files = policy.files_per_layer if isinstance(policy, DynaKV) and not config.exact else 1
    return KVStore.create(
        config.store, num_layers=files * shape.num_layers,
        unit_bytes=unit_tokens * shape.token_bytes, sealed=config.sealed,
    )  # fmt: skip
