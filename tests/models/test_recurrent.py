"""Recurrent layers beside tiered ones: the plain model's answers, states that go back to where
they can, and their memory in the ledger."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from penstock import KVSwap, TieredCache
from penstock.core.errors import BudgetError, CacheStateError, ConfigError, UnsupportedModelError
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.generation.verified_decoding import check_verifiable
from penstock.models.beam_cache import block_shape
from penstock.models.cache_argument import cache_argument
from penstock.models.calibrate import calibrate
from penstock.models.model_shape import inspect_model
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.testing.tiny_families import tiny_family

pytestmark = pytest.mark.skipif(
    not HAS_RECURRENT_LAYERS, reason="this transformers keeps recurrent states elsewhere"
)
FAMILIES = ["qwen3_next", "falcon_h1", "lfm2", "nemotron_h"]
"""Linear attention, both in one layer, convolutions alone, and layers without a cache."""
IDS = torch.randint(3, 160, (3, 90), generator=torch.Generator().manual_seed(5))
MASK = torch.ones(3, 90, dtype=torch.int64)
MASK[0, :7] = MASK[2, :31] = 0
SMALL = KVSwap(window_tokens=8, selected_tokens=16, sink_tokens=4)


@torch.no_grad()
def read(model: Any, cache: Any, begin: int, end: int, rows: int = 3) -> Tensor:
    """Logits behind the last of some tokens. [rows, vocabulary]"""
    positions = (MASK.cumsum(1) - 1).clamp_min(0)[:rows, begin:end]
    out: Tensor = model(
        IDS[:rows, begin:end], attention_mask=MASK[:rows, :end], position_ids=positions,
        **cache_argument(model, cache), use_cache=True,
    ).logits[:, -1]  # fmt: skip
    return out


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_in_chunks_and_turns_is_the_plain_models(family: str) -> None:
    model = tiny_family(family)
    plain = DynamicCache(config=model.config)
    right = [read(model, plain, 0, 60)] + [read(model, plain, i, i + 1) for i in range(60, 64)]
    right += [read(model, plain, 64, 80), read(model, plain, 80, 81)]
    for exact, policy in ((True, SMALL), (False, KVSwap(selected_tokens=1000))):
        with TieredCache(
            model, policy, store="memory", max_tokens=90, batch_size=3, exact=exact,
            must_tier=not exact,
        ) as cache:  # fmt: skip
            for repeat in range(1 + exact):
                read(model, cache, 0, 33)
                found = [read(model, cache, 33, 60)]
                found += [read(model, cache, i, i + 1) for i in range(60, 64)]
                found += [read(model, cache, 64, 80), read(model, cache, 80, 81)]
                for mine, plains in zip(found, right, strict=True):
                    close(mine, plains)
                if repeat < exact:
                    cache.reset()
            held = cache.report().items["recurrent states"]
            tensors = [t for s in cache._states.values() for t in s.state_tensors().values()]
            assert held == 2 * sum(each.nbytes for each in tensors) > 0


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_states_go_back_to_checkpoints_alone(family: str) -> None:
    model = tiny_family(family)
    with TieredCache(
        model, SMALL, exact=True, store="memory", max_tokens=90, batch_size=3, checkpoints=1
    ) as cache:
        right = read(model, cache, 0, 40)
        cache.checkpoint()
        read(model, cache, 40, 60)
        cache.crop(-20)  # the last step
        behind = read(model, cache, 40, 70)
        read(model, cache, 70, 80)
        assert list(cache.checkpoints) == [0, 40, 70, 80]
        with pytest.raises(CacheStateError, match=r"behind 0, 40, 70, 80: rewind\(66\)"):
            cache.crop(66)
        assert cache.get_seq_length() == 80
        assert cache.rewind(66) == 40
        assert cache.stats.again_tokens == 3 * 26
        close(read(model, cache, 40, 70), behind)
        rows = torch.tensor([2, 0])
        cache.batch_select_indices(rows)  # checkpoints follow their rows
        assert list(cache.checkpoints) == [0, 40, 70]
        cache.crop(40)
        cache.batch_repeat_interleave(2)
        assert cache.rewind(39) == 0
        assert cache.get_seq_length() == 0
        close(read(model, cache, 0, 40), right)
        with pytest.raises(CacheStateError, match="prompt lookup and assisted decoding"):
            cache.activate_past_recording()
        with pytest.raises(ConfigError, match="leave verify out"):
            check_verifiable(cache)
    with pytest.raises(UnsupportedModelError, match="recurrent layers, whose states a search"):
        block_shape(model, 16)


def test_a_refused_step_leaves_the_states() -> None:
    """The first recurrent layers have taken the tokens in when the tiers refuse them."""
    model = tiny_family("qwen3_next")
    given: dict[str, Any] = {"store": "memory", "max_tokens": 62, "batch_size": 3}
    with TieredCache(model, SMALL, exact=True, **given) as cache:
        read(model, cache, 0, 60)
        with pytest.raises(CacheStateError, match="62"):
            read(model, cache, 60, 70)
        found = read(model, cache, 60, 61)
    close(found, read(model, DynamicCache(config=model.config), 0, 61))


def test_beams_carry_their_states() -> None:
    model: Any = tiny_family("falcon_h1")
    given = {
        "input_ids": IDS, "attention_mask": MASK, "num_beams": 3, "max_new_tokens": 6,
        "do_sample": False, "eos_token_id": None,
    }  # fmt: skip
    right = model.generate(**given)
    with TieredCache(
        model, SMALL, exact=True, store="memory", max_tokens=100, batch_size=9
    ) as cache:
        assert torch.equal(model.generate(**given, **cache_argument(model, cache)), right)


def test_states_are_in_the_budget() -> None:
    """Of a size they are a part; to a share of keys and values they come on top."""
    model = tiny_family("qwen3_next")
    full = inspect_model(model).kv.full_cache_bytes(1, 400)
    given: dict[str, Any] = {"store": "memory", "max_tokens": 400}
    with TieredCache(model, SMALL, "1/2", **given) as cache:
        states = cache.plan.state_bytes
        assert cache._settings.limit_bytes == full // 2 + states
        read(model, cache, 0, 90, rows=1)
        memory = cache.report()
        assert states < memory.used_bytes <= memory.limit_bytes
    with pytest.raises(BudgetError, match="recurrent states") as refused:
        TieredCache(model, SMALL, states + 1000, **given)
    needed = refused.value.needed_bytes
    assert needed is not None
    assert needed > states
    with TieredCache(model, SMALL, needed, **given) as cache:
        read(model, cache, 0, 90, rows=1)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_a_full_layer_behind_a_recurrent_one_is_predicted(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From that one's input, by the layer's own code; jamba's two kinds are called alike too."""
    model = tiny_family(family)
    [first, *_] = inspect_model(model).tiered_layers
    begun: list[int] = []
    begin = TieredRuntime.begin_fetch

    def begin_fetch(runtime: TieredRuntime, layer: int, query: Tensor) -> None:
        begun.append(layer)
        begin(runtime, layer, query)

    monkeypatch.setattr(TieredRuntime, "begin_fetch", begin_fetch)
    with TieredCache(model, SMALL, store="memory", max_tokens=90) as cache:
        read(model, cache, 0, 88, rows=1)
        for place in (88, 89):
            read(model, cache, place, place + 1, rows=1)
            assert (first - 1) in cache._hooks._begun  # type: ignore[union-attr]
        assert begun.count(0) == 2
    basis = calibrate(model, [IDS[0]], rank=8)
    assert basis.prediction_cosine[0] != 0
