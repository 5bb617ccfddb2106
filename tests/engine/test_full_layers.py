"""First layers kept whole: exact, booked, and the others retrieve all the same, in every method."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.device_steps import make_ready
from penstock.engine.policy import SelectionPolicy
from penstock.engine.retrieval_policy import BaselinePolicy
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.kernels.plain_attention import attention_twin
from penstock.methods import POLICIES
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

KEEP = sorted(
    name for name, policy in POLICIES.items()
    if issubclass(policy, BaselinePolicy) and policy.can_keep_whole
)  # fmt: skip
"""Methods that can keep layers whole."""
SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
TOKENS = 128


def make_policy(name: str, whole: int) -> SelectionPolicy:
    """Selects some 16 tokens beside 2 sinks and a window of 4."""
    options: dict[str, Any] = {
        "selected_tokens": 16, "window_tokens": 4, "sink_tokens": 2, "full_layers": whole,
    }  # fmt: skip
    if name in {"quest", "arkvale", "shadowkv", "leoam"}:
        options["group_tokens"] = 4
    return POLICIES[name](**options)


def make_runtime(
    policy: SelectionPolicy, batch: int, *, store: str = "memory", limit: int | None = None,
    device_tier: bool = False,
) -> TieredRuntime:  # fmt: skip
    config = RuntimeSettings(
        shape=SHAPE, policy=policy, limit_bytes=limit, store=store, max_tokens=TOKENS, exact=False,
        adapter=None, device=torch.device("cpu"), device_tier=device_tier,
    )  # fmt: skip
    return TieredRuntime(config, batch)


class Life:
    """Feeds a runtime random tokens and compares both layers with plain attention."""

    def __init__(self, runtime: TieredRuntime, batch: int) -> None:
        self.runtime = runtime
        self._random = torch.Generator().manual_seed(0)
        self.past = torch.zeros(2, batch, 2, 0, 16)

    def take(self, count: int) -> list[float]:
        """The largest error of each layer."""
        batch = self.past.shape[1]
        query = torch.randn(batch, 4, count, 16, generator=self._random)
        new = torch.randn(2, batch, 2, count, 16, generator=self._random)
        self.past = torch.cat([self.past, new], dim=3)
        call = AttentionCall(query, new[0], new[1], 0.25)
        outs = [self.runtime.attend(layer, call).transpose(1, 2) for layer in range(2)]
        exact, _ = attention_twin(query, self.past[0], self.past[1], scaling=0.25)
        report = self.runtime.report()
        assert report.used_bytes <= report.limit_bytes
        return [float((out - exact).abs().max()) for out in outs]


@pytest.mark.parametrize("name", KEEP)
def test_the_first_layers_can_stay_whole(name: str) -> None:
    """Layer 0 is exact at any budget, its memory is booked, and layer 1 still retrieves."""
    for whole in (0, 1):
        runtime = make_runtime(make_policy(name, whole), 1)
        try:
            life = Life(runtime, 1)
            for count in (60, 1, 1, 1):
                first, second = life.take(count)
            assert (first < 1e-5) == (whole == 1)
            assert second > 1e-3
            held = runtime.report().items["slots and window"]
            assert held >= whole * TOKENS * SHAPE.token_bytes
        finally:
            runtime.close()


@pytest.mark.parametrize(
    ("name", "store"),
    [("louiskv", "memory"), ("quest", "memory"), ("raas", "memory"), ("louiskv", "host"),
     ("quest", "host"), ("arkvale", "host")],
)  # fmt: skip
def test_whole_layers_share_the_life_of_the_others(name: str, store: str) -> None:
    """Steps, a reorder, a larger batch, a crop and a reset: the whole layer stays exact."""
    runtime = make_runtime(make_policy(name, 1), 2, store=store, device_tier=store == "host")
    life = Life(runtime, 2)

    def step() -> None:
        first, second = life.take(1)
        assert first < 1e-5
        assert second > 1e-3

    try:
        life.take(60)
        step()
        step()
        for rows in ([1, 0], [0, 1, 1]):
            runtime.select_rows(torch.tensor(rows))
            life.past = life.past[:, rows]
            step()
        if name != "raas":  # what it dropped does not come back
            runtime.crop(50)
            life.past = life.past[:, :, :, :50]
            step()
        runtime.reset()
        life.past = life.past[:, :, :, :0]
        life.take(40)
        step()
    finally:
        runtime.close()


def test_steps_beside_whole_layers_can_be_recorded() -> None:
    """On the device tier; a cache that is whole by itself, or on a disk, has no such steps."""
    for store, recordable in (("host", True), ("memory", False)):
        runtime = make_runtime(make_policy("quest", 1), 1, store=store, device_tier=recordable)
        try:
            Life(runtime, 1).take(60)
            assert make_ready(runtime.layers) == recordable
        finally:
            runtime.close()


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "louiskv"), ("gemma3", "quest"), ("gpt_oss", "louiskv"), ("gpt_oss", "quest"),
     ("opt", "louiskv")],
)  # fmt: skip
def test_padded_rows_of_real_models_on_the_device_tier(family: str, name: str) -> None:
    """At a full budget the answer is that of full attention, sinks of logits included."""
    model: Any = tiny_model(family)
    ids = torch.randint(3, VOCABULARY, (2, 90), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, :25], mask[1, :25] = 0, 0
    everything: dict[str, Any] = {"selected_tokens": 10**6, "window_tokens": 8, "full_layers": 1}
    policy = POLICIES[name](**everything)
    told = []
    with TieredCache(model, policy, store="host", max_tokens=160, batch_size=2) as cache:
        assert cache._settings.device_tier
        for held in (cache, DynamicCache(config=model.config)):
            out = model.generate(
                ids, attention_mask=mask, **cache_argument(model, held), max_new_tokens=6,
                do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            told.append((out.sequences, torch.stack(out.logits)))
    (mine, logits), (expected, plain) = told
    assert torch.equal(mine, expected)
    assert (logits - plain).abs().max() < 1e-3


@pytest.mark.parametrize("name", KEEP)
def test_a_budget_holds_both(name: str) -> None:
    """The smallest budget that is named is enough, and a byte less is not."""
    policy = make_policy(name, 1)
    with pytest.raises(BudgetError) as caught:
        make_runtime(policy, 1, limit=1000)
    least = caught.value.needed_bytes
    assert least is not None
    assert least > TOKENS * SHAPE.token_bytes
    with pytest.raises(BudgetError):
        make_runtime(policy, 1, limit=least - 1)
    runtime = make_runtime(policy, 1, limit=least)
    try:
        life = Life(runtime, 1)
        life.take(60)
        assert life.take(1)[0] < 1e-5
    finally:
        runtime.close()


def test_refuses_a_negative_number() -> None:
    with pytest.raises(ConfigError, match="full_layers=-1"):
        make_policy("louiskv", -1)


@pytest.mark.parametrize("name", ["dynakv", "hillinfer"])
def test_refuses_where_layers_share(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} keeps no layer whole"):
        POLICIES[name](full_layers=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["louiskv", "quest"])
def test_refuses_to_keep_all_layers_whole(name: str) -> None:
    with pytest.raises(ConfigError, match="leaves none of 2 layers"):
        make_runtime(make_policy(name, 2), 1)
