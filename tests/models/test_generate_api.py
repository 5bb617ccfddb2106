"""Everything that `generate` asks of a cache works on a TieredCache as on a DynamicCache."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, TextStreamer
from transformers.cache_utils import DynamicSlidingWindowLayer

from penstock import KVSwap, TieredCache
from penstock.core.errors import CacheStateError, UnsupportedModelError
from penstock.methods import FlexGen, Full, SelectionPolicy
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICIES: dict[str, tuple[SelectionPolicy, dict[str, Any]]] = {
    "full": (Full(), {}),
    "flexgen": (FlexGen(group_tokens=8), {}),
    "kvswap": (KVSwap(window_tokens=8, selected_tokens=10**6), {}),
    "kvswap-no-reuse": (KVSwap(window_tokens=8, selected_tokens=10**6, reuse_tokens=0), {}),
    "exact": (KVSwap(window_tokens=8), {"exact": True}),
}
NEVER = VOCABULARY + 7
"""An end token that no model here can produce (older transformers choke on None)."""

REMOVED = (1, 3, 9, 40)
"""Tokens by crops."""

each_policy = pytest.mark.parametrize("name", POLICIES)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (2, 70), generator=generator)


def tiered(model: PreTrainedModel, name: str, batch: int) -> TieredCache:
    policy, options = POLICIES[name]
    return TieredCache(model, policy, store="memory", max_tokens=200, batch_size=batch, **options)


def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    defaults = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": NEVER}
    mask = torch.ones_like(ids)
    out: torch.Tensor = model.generate(
        ids, attention_mask=mask, **cache_argument(model, cache), **{**defaults, **kwargs}
    )
    return out


def plain(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def play(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits behind rows that were repeated, decoded apart, reordered and selected."""
    with torch.no_grad():
        model(ids, **cache_argument(model, cache))
        cache.batch_repeat_interleave(2)
        tokens = torch.tensor([[5], [6], [7], [8]])
        for _ in range(6):
            logits = model(tokens, **cache_argument(model, cache)).logits
            tokens = logits[:, -1:].argmax(-1)
        cache.reorder_cache(torch.tensor([2, 2, 0, 3]))
        for _ in range(6):
            logits = model(tokens, **cache_argument(model, cache)).logits
            tokens = logits[:, -1:].argmax(-1)
        cache.batch_select_indices(torch.tensor([3, 1]))
        last: torch.Tensor = model(tokens[[3, 1]], **cache_argument(model, cache)).logits
    return last


@pytest.fixture(scope="module")
def assistant() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


@pytest.fixture(scope="module")
def repeated(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([ids[:1, :30], ids[:1, :30], ids[:1, :9]], dim=1)


@pytest.fixture(scope="module")
def expected_of(
    model: PreTrainedModel, assistant: PreTrainedModel, ids: torch.Tensor, repeated: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What each test that runs on several policies gets of a plain cache."""
    found = {
        "beams": run(model, plain(model), ids, num_beams=3),
        "lookup": run(model, plain(model), repeated, prompt_lookup_num_tokens=4),
        "assisted": run(model, plain(model), ids[:1], assistant_model=assistant),
        "steps": play(model, plain(model), ids),
    }
    for remove in REMOVED:
        kept = ids[:, : 70 - remove]
        found[f"crop {remove}"] = run(model, plain(model), kept, max_new_tokens=8)
    torch.manual_seed(3)
    found["sampled"] = run(model, plain(model), ids, do_sample=True, top_p=0.9)
    return found


def test_sampling_with_a_seed(
    model: PreTrainedModel, ids: torch.Tensor, expected_of: dict[str, torch.Tensor]
) -> None:
    torch.manual_seed(3)
    with tiered(model, "kvswap", 2) as cache:
        found = run(model, cache, ids, do_sample=True, top_p=0.9)
    assert torch.equal(expected_of["sampled"], found)


@each_policy
def test_token_beam_search(
    name: str, model: PreTrainedModel, ids: torch.Tensor, expected_of: dict[str, torch.Tensor]
) -> None:
    with tiered(model, name, 6) as cache:
        assert torch.equal(expected_of["beams"], run(model, cache, ids, num_beams=3))


@each_policy
def test_prompt_lookup_crops(
    name: str, model: PreTrainedModel, repeated: torch.Tensor, expected_of: dict[str, torch.Tensor]
) -> None:
    """Assisted decoding verifies several tokens at once and crops the refused ones."""
    with tiered(model, name, 1) as cache:
        found = run(model, cache, repeated, prompt_lookup_num_tokens=4)
    assert torch.equal(expected_of["lookup"], found)


@pytest.mark.parametrize("name", ["kvswap", "exact"])
def test_assistant_model(
    name: str, model: PreTrainedModel, assistant: PreTrainedModel, ids: torch.Tensor,
    expected_of: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    with tiered(model, name, 1) as cache:
        found = run(model, cache, ids[:1], assistant_model=assistant)
    assert torch.equal(expected_of["assisted"], found)


def test_streamer(model: PreTrainedModel, ids: torch.Tensor) -> None:
    seen: list[int] = []

    class Collect(TextStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.skipped = False

        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.reshape(-1).tolist())

        def end(self) -> None:
            seen.append(-1)

    with tiered(model, "kvswap", 1) as cache:
        out = run(model, cache, ids[:1], streamer=Collect())
    assert [*out[0].tolist(), -1] == seen


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        (name, remove)
        for number, name in enumerate(POLICIES)
        for place, remove in enumerate(REMOVED)
        if (number + place) % 2 == 0
    ],
)
def test_crop_then_go_on(
    name: str, remove: int, model: PreTrainedModel, ids: torch.Tensor,
    expected_of: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    """After a crop, within the window or far beyond it, decoding goes on as if never cropped."""
    with tiered(model, name, 2) as cache, torch.no_grad():
        model(ids, **cache_argument(model, cache))
        model(ids[:, :1], **cache_argument(model, cache))
        cache.crop(-1 - remove)
        assert cache.get_seq_length() == 70 - remove
        # generate() feeds what the cache does not hold: give it back the last token
        cache.crop(-1)
        actual = run(model, cache, ids[:, : 70 - remove], max_new_tokens=8)
    assert torch.equal(expected_of[f"crop {remove}"], actual)


@each_policy
def test_step_wise_rows(
    name: str, model: PreTrainedModel, ids: torch.Tensor, expected_of: dict[str, torch.Tensor]
) -> None:
    """Repeat, decode apart, select and reorder rows: as on a DynamicCache."""
    with tiered(model, name, 4) as cache:
        assert torch.allclose(expected_of["steps"], play(model, cache, ids), atol=1e-4)


@pytest.mark.parametrize("none", [torch.tensor([], dtype=torch.long), torch.zeros(2).bool()])
def test_a_batch_of_no_rows_is_refused(
    none: torch.Tensor, model: PreTrainedModel, ids: torch.Tensor
) -> None:
    with tiered(model, "kvswap", 2) as cache:
        run(model, cache, ids)
        with pytest.raises(CacheStateError, match="no rows"):
            cache.batch_select_indices(none)
        with torch.no_grad():
            assert model(ids[:, :1], **cache_argument(model, cache)).logits.isfinite().all()


def test_reset_and_reuse(model: PreTrainedModel, ids: torch.Tensor) -> None:
    expected = run(model, plain(model), ids)
    with tiered(model, "kvswap", 2) as cache:
        run(model, cache, ids.flip(1))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(expected, run(model, cache, ids))


@pytest.mark.parametrize("tokens", [15, 60], ids=["within the window", "beyond it"])
def test_a_crop_that_removes_nothing_leaves_the_windows(tokens: int, ids: torch.Tensor) -> None:
    model = tiny_model("gemma3")
    expected = run(model, plain(model), ids[:, : tokens + 1])
    with tiered(model, "kvswap", 2) as cache, torch.no_grad():
        model(ids[:, :tokens], **cache_argument(model, cache))
        cache.crop(tokens)
        cache.crop(0)
        assert torch.equal(expected, run(model, cache, ids[:, : tokens + 1]))


def test_windows_of_older_transformers(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.24 `crop` took the length to keep, and `reset` left zeros to append to."""

    def crop(layer: Any, keep: int) -> None:
        keep = layer.get_seq_length() + keep if keep < 0 else keep
        layer.keys, layer.values = layer.keys[..., :keep, :], layer.values[..., :keep, :]
        layer.cumulative_length = layer.keys.shape[-2]

    def reset(layer: Any) -> None:
        if layer.is_initialized:
            layer.keys.zero_()
            layer.values.zero_()
        layer.cumulative_length = 0

    model = tiny_model("gemma3")
    expected = run(model, plain(model), ids[:, :15])
    monkeypatch.setattr(DynamicSlidingWindowLayer, "crop", crop)
    monkeypatch.setattr(DynamicSlidingWindowLayer, "reset", reset)
    with tiered(model, "kvswap", 2) as cache, torch.no_grad():
        model(ids[:, 20:30], **cache_argument(model, cache))
        cache.reset()
        model(ids[:, :14], **cache_argument(model, cache))
        cache.crop(14)
        assert torch.equal(expected, run(model, cache, ids[:, :15]))


def test_truthful_answers(model: PreTrainedModel, ids: torch.Tensor) -> None:
    with tiered(model, "kvswap", 2) as cache:
        assert cache.get_seq_length() == 0
        assert cache.batch_size == -1
        assert cache.get_mask_sizes(7, 0) == (7, 0)
        assert not cache.is_compileable
        run(model, cache, ids, max_new_tokens=5)
        assert cache.get_seq_length() == 74
        assert cache.get_seq_length(2) == 74
        assert cache.get_mask_sizes(1, 1) == (75, 0)
        assert cache.get_max_length() == 200
        assert cache.batch_size == 2


def test_the_model_is_put_back(model: PreTrainedModel, ids: torch.Tensor) -> None:
    before = model.config._attn_implementation
    expected = run(model, plain(model), ids)
    first = tiered(model, "kvswap", 2)
    second = tiered(model, "full", 2)
    run(model, first, ids)
    assert torch.equal(expected, run(model, plain(model), ids)), "a plain cache beside ours"
    first.close()
    assert torch.equal(expected, run(model, second, ids)), "the second cache outlives the first"
    second.close()
    assert model.config._attn_implementation == before
    assert not any("penstock" in name for name in model.__dict__)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(CacheStateError, match=r"closed|changed"):
        run(model, second, ids)


def test_too_many_tokens(model: PreTrainedModel, ids: torch.Tensor) -> None:
    cache = TieredCache(model, "kvswap", store="memory", max_tokens=72, batch_size=2)
    with cache, pytest.raises(CacheStateError, match="max_tokens=72"):
        run(model, cache, ids)


def test_a_4d_mask_is_refused(model: PreTrainedModel, ids: torch.Tensor) -> None:
    mask = torch.ones(2, 1, 70, 70, dtype=torch.bool).tril()
    with tiered(model, "kvswap", 2) as cache, pytest.raises(UnsupportedModelError, match="4D"):
        model(ids, attention_mask=mask, **cache_argument(model, cache))


@pytest.mark.parametrize("memory", ["auto", "1/1", "100%", 1.0])
@pytest.mark.parametrize("policy", ["full", "kvswap"])
def test_a_budget_of_everything_is_enough(
    policy: str, memory: str | float, model: PreTrainedModel, ids: torch.Tensor
) -> None:
    with TieredCache(model, policy, memory=memory, max_tokens=100, batch_size=2) as cache:
        assert cache.plan.is_resident
        assert torch.equal(run(model, plain(model), ids), run(model, cache, ids))
