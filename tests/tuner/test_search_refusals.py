"""KVSwap's search refuses what cannot be searched, and says what would do."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.core.errors import BudgetError, PenstockError
from penstock.engine.adapter import LowRankAdapter
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.model_shape import inspect_model
from penstock.tuner.kvswap_search import KVSwapSearch
from penstock.tuner.tuning_task import TuningTask

MakeTask = Callable[..., TuningTask]


def test_the_budget_that_is_named_would_do(sparse: MakeTask) -> None:
    """And a little less would not."""
    with pytest.raises(BudgetError, match="nothing fits") as caught:
        KVSwapSearch(sparse(limit_bytes=300_000))
    needed = caught.value.needed_bytes
    assert needed is not None
    assert f"({needed} bytes)" in str(caught.value)
    with pytest.raises(BudgetError):
        KVSwapSearch(sparse(limit_bytes=int(needed * 0.99)))
    try:
        KVSwapSearch(sparse(limit_bytes=needed, floor=float("inf")))
    except BudgetError as error:
        pytest.fail(f"{needed:,} bytes were to be enough: {error}")


def test_nothing_of_quality_fits(sparse: MakeTask) -> None:
    class Strict:
        def reuse_rate(self, group: int, selected: int, capacity: int) -> float:
            return 0.5

        def kl(self, policy: KVSwap) -> float:
            return policy.group_tokens / 10

    strict = Strict()
    KVSwapSearch(sparse(max_batch=1, tables=strict, floor=0.1))
    with pytest.raises(BudgetError, match=r"within 0\.05 nats.*closest: 0\.100"):
        KVSwapSearch(sparse(max_batch=1, tables=strict, floor=0.05))


def test_an_adapter_that_no_setting_can_use(sparse: MakeTask) -> None:
    """Nothing fits, and no budget would change that: it is said, not found out in a fit."""
    adapter = sparse().adapter
    assert adapter is not None
    layers = [layer.truncated(8) for layer in adapter.layers]
    poor = LowRankAdapter(layers, adapter.fingerprint, 0)
    task = sparse(adapter=poor, max_context=2048, max_batch=1)
    full = inspect_model(task.model).kv.full_cache_bytes(1, 2048)
    with pytest.raises(PenstockError):
        KVSwapSearch(replace(task, limit_bytes=full)).solve()
