"""open_store(): where the full KV of a cache goes, as its policy wants it."""

from penstock.core.shape import KVShape
from penstock.engine.policy import StoreRequest
from penstock.engine.runtime_config import RuntimeConfig
from penstock.engine.stored_past import overlay_store
from penstock.storage.store import KVStore


def open_store(config: RuntimeConfig, shape: KVShape, unit_tokens: int, batch: int) -> KVStore:
    """Open the store of a cache.

    Args:
        shape: of a row.
        unit_tokens: tokens of a unit.
        batch: sequences that the cache is planned for.

    Raises:
        ConfigError: the location makes no sense.
        StorageError: it cannot be used, or what serves it does not start.
    """
    request = StoreRequest(
        location=config.store, sealed=config.sealed, shape=shape,
        unit_bytes=unit_tokens * shape.token_bytes, batch=batch, max_tokens=config.max_tokens,
        scaling=config.logit_scaling,
    )  # fmt: skip
    if config.past is not None and config.shares_past:
        own = KVStore.create(
            config.store, num_layers=shape.num_layers, unit_bytes=config.past.padded_bytes,
            sealed=config.sealed,
        )  # fmt: skip
        return overlay_store(config.past, own)
    return request.create() if config.exact else config.policy.open_store(request)
