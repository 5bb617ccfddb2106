"""open_store(): where the full KV of a cache goes, as its policy wants it."""

from penstock.core.shape import KVShape
from penstock.engine.policy import StoreRequest
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.stored_past import overlay_store
from penstock.storage.store import KVStore


def open_store(settings: RuntimeSettings, shape: KVShape, unit_tokens: int, batch: int) -> KVStore:
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
        location=settings.store, sealed=settings.sealed, shape=shape,
        unit_bytes=unit_tokens * shape.token_bytes, batch=batch, max_tokens=settings.max_tokens,
        scaling=settings.logit_scaling, sector_bytes=settings.sector_bytes,
    )  # fmt: skip
    if settings.past is not None and settings.shares_past:
        own = KVStore.create(
            settings.store, num_layers=shape.num_layers, unit_bytes=settings.past.padded_bytes,
            sealed=settings.sealed,
        )  # fmt: skip
        return overlay_store(settings.past, own)
    return request.create() if settings.exact else settings.policy.open_store(request)
