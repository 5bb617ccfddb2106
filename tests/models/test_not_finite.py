"""Keys that are not finite: logits that say so, or an error that does."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from penstock import TieredCache
from penstock.core.errors import CacheStateError
from penstock.methods import POLICIES
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import tiny_model

BAD = [float("nan"), float("inf"), float("-inf")]
WHERE = ["first", "last", "decoded"]


def cases() -> Iterator[tuple[str, str, str, float]]:
    """Each policy in each tier: a token of the prompt and one behind it, other values in turn."""
    for number, (name, store) in enumerate(product(sorted(POLICIES), ("memory", "host"))):
        if store == "host" and not POLICIES[name].device_tier:
            continue
        for place, where in enumerate((WHERE[(number // 2 + number) % 2], "decoded")):
            yield name, store, where, BAD[(number + place) % 3]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@torch.no_grad()
@pytest.mark.parametrize(("name", "store", "where", "bad"), list(cases()))
def test_no_librarys_error_comes_out(
    name: str, store: str, where: str, bad: float, model: Any
) -> None:
    policy = POLICIES[name]()

    def spoil(_: Any, args: Any, keys: torch.Tensor) -> torch.Tensor | None:
        if (keys.shape[1] == 1) != (where == "decoded"):
            return None
        keys = keys.clone()
        keys[:, -1 if where == "last" else 0, 5] = bad
        return keys

    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(spoil)
    ids = torch.arange(3, 77)[None]
    try:
        with TieredCache(model, policy, store=store, max_tokens=128, must_tier=True) as cache:
            try:
                logits = model(ids, **cache_argument(model, cache)).logits[:, -1]
                for _ in range(4):
                    out = model(ids[:, :1], **cache_argument(model, cache))
                    logits = out.logits[:, -1]
            except CacheStateError as error:
                if "not finite" not in str(error):
                    raise
            else:
                assert logits.isnan().any()
    finally:
        hook.remove()
