"""The bundled model's adapters: the one of keys turned back by blocks first, and the former one."""

from penstock.kernels.key_rotation import BLOCK_TOKENS
from penstock.models.bundled_adapter import adapters_at_hand
from penstock.models.cache_adapter import TieredCache
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import load


def test_both_are_at_hand() -> None:
    """New caches take the first; documents find the one that they were stored with."""
    model = load("recall").model
    present, former = list(adapters_at_hand(fingerprint(model)))[-2:]
    assert (present.block_tokens, former.block_tokens) == (BLOCK_TOKENS, 0)
    assert present.rank == former.rank
    with TieredCache(model, "kvswap", "1/4", "memory", max_tokens=2048) as cache:
        assert cache.notices == []
    with TieredCache(
        model, "kvswap", "1/4", "memory", max_tokens=2048, adapter=former
    ) as cache:  # fmt: skip
        assert "as the model turns them" in " ".join(cache.notices)
