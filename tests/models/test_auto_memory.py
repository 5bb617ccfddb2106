""" "auto" is never below what a cache cannot do without, whatever the length and the policy."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import TieredCache
from penstock.core.errors import BudgetError
from penstock.methods import POLICIES
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import tiny_model

LENGTHS = {False: [3, 17, 64, 200], True: [1, 2, 16, 17, 64, 127, 300]}
"""By whether there must be tiers."""
LONG = {False: [300], True: [1, 64]}
"""Of a policy that starts processes for each cache."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Callable[[int], Tensor]:
    """The model's own logits of so many tokens."""

    @cache
    def logits(length: int) -> Tensor:
        found: Tensor = model(torch.arange(3, 3 + length)[None]).logits
        return found

    return logits


@torch.no_grad()
@pytest.mark.parametrize("must_tier", [False, True])
@pytest.mark.parametrize("store", ["memory", "host"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_auto_refuses_nothing(
    name: str, store: str, must_tier: bool, model: PreTrainedModel, plain: Callable[[int], Tensor]
) -> None:
    policy = POLICIES[name]()
    if store == "host" and not (policy.device_tier or policy.stays_resident):
        pytest.skip("not for the device tier")
    lengths = (LONG if name == "hillinfer" else LENGTHS)[must_tier]
    for number, length in enumerate(lengths, start=sorted(POLICIES).index(name) + must_tier):
        batch = (1, 3)[number % 2]  # the other one where `must_tier` is otherwise
        with TieredCache(
            model, policy, "auto", store, max_tokens=length, batch_size=batch,
            must_tier=must_tier,
        ) as tiers:  # fmt: skip
            if length in (1, 17, 64):
                ids = torch.arange(3, 3 + length)[None].repeat(batch, 1)
                found = model(ids, **cache_argument(model, tiers)).logits
                expected = plain(length).expand_as(found)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_budget_that_somebody_set_is_kept() -> None:
    with pytest.raises(BudgetError, match="smallest budget"):
        TieredCache(tiny_model("llama"), "kvswap", "5%", "memory", max_tokens=30)
