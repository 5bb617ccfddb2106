"""With a full budget, or in exact mode at any budget, generation equals transformers' own cache."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock import KVSwap, TieredCache
from penstock.methods import FlexGen, Full, Quest, SelectionPolicy
from penstock.methods.louiskv.policy import LouisKV
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import FAMILIES, VOCABULARY, tiny_model

CHUNK = None if version.parse(transformers.__version__) < version.parse("5.21") else 31
"""Before 5.21 transformers lost count in chunked prefill, with its own caches too."""
TOLERANCE = 1e-4
PROMPT_TOKENS = 90
PADDING = (0, 37, 61)
SMALL_BUDGET = "1/3"

SETTINGS: dict[str, tuple[SelectionPolicy, dict[str, Any]]] = {
    "full": (Full(), {}),
    "flexgen": (FlexGen(group_tokens=8), {}),
    "kvswap-resident": (KVSwap(), {}),
    "kvswap": (KVSwap(window_tokens=8, selected_tokens=10**6), {}),
    "kvswap-selected": (KVSwap(window_tokens=8, selected_tokens=10**6, attend="selected"), {}),
    "kvswap-no-reuse": (KVSwap(window_tokens=8, selected_tokens=10**6, reuse_tokens=0), {}),
    "quest": (Quest(group_tokens=8, window_tokens=8, selected_tokens=10**6), {}),
    "exact": (KVSwap(window_tokens=8), {"exact": True, "memory": SMALL_BUDGET}),
    "flexgen-device-tier": (FlexGen(group_tokens=8), {"store": "host"}),
    "kvswap-device-tier": (KVSwap(window_tokens=8, selected_tokens=10**6), {"store": "host"}),
    "quest-device-tier": (
        Quest(group_tokens=8, window_tokens=8, selected_tokens=10**6), {"store": "host"},
    ),
    "louiskv-device-tier": (
        LouisKV(window_tokens=8, sink_tokens=4, selected_tokens=10**6), {"store": "host"},
    ),
    "exact-device-tier": (
        KVSwap(window_tokens=8), {"exact": True, "memory": "1/2", "store": "host"},
    ),
}  # fmt: skip


def prompts(batch: int, seed: int = 0, tokens: int = PROMPT_TOKENS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch if batch > 1 else 0):
        ids[row, : PADDING[row]] = 0
        mask[row, : PADDING[row]] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    return model.generate(
        **inputs, **cache_argument(model, cache), max_new_tokens=4, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        **kwargs,
    )  # fmt: skip


def two_turns(model: PreTrainedModel, cache: Any, batch: int, **kwargs: Any) -> list[Any]:
    """A first answer, then a second question on the same cache."""
    inputs = prompts(batch)
    first = generate(model, cache, inputs, **kwargs)
    question = prompts(batch, seed=1, tokens=23)["input_ids"].clamp_min(3)
    ids = torch.cat([first.sequences, question], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :PROMPT_TOKENS] = inputs["attention_mask"]
    second = generate(model, cache, {"input_ids": ids, "attention_mask": mask}, **kwargs)
    return [first, second]


def assert_same(expected: Any, actual: Any) -> None:
    assert torch.equal(expected.sequences, actual.sequences)
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() <= TOLERANCE


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def reference(models: dict[str, PreTrainedModel]) -> Callable[[str, int], list[Any]]:
    """What a model answers to a batch with transformers' own cache."""

    @cache
    def answers(family: str, batch: int) -> list[Any]:
        model = models[family]
        return two_turns(model, DynamicCache(config=model.config), batch)

    return answers


def cases() -> list[tuple[str, str, int, int | None]]:
    """Each setting on llama and on two other families, in three ways: with both batches and both
    chunks. A sweep over policies is in tests/conformance."""
    found = []
    ways = list(product((1, 3), sorted({None, CHUNK}, key=str)))
    others = [family for family in FAMILIES if family != "llama"]
    for place, setting in enumerate(SETTINGS):
        families = ["llama", others[place % len(others)], others[(place + 8) % len(others)]]
        # The second way is the first one's opposite in both.
        third = place % 3 % len(ways)
        chosen = [ways[place % len(ways)], ways[-1 - place % len(ways)], ways[third]]
        found += [(family, setting, *way) for family, way in zip(families, chosen, strict=True)]
    return found


@pytest.mark.parametrize(("family", "setting", "batch", "chunk"), cases())
def test_equals_the_plain_model(
    family: str,
    setting: str,
    batch: int,
    chunk: int | None,
    models: dict[str, PreTrainedModel],
    reference: Callable[[str, int], list[Any]],
) -> None:
    policy, options = SETTINGS[setting]
    model = models[family]
    # Memory stands in for the disk here; test_real_disk runs the same over real files.
    options = {"store": "memory", **options}
    with TieredCache(model, policy, max_tokens=160, batch_size=batch, **options) as c:
        for expected, actual in zip(
            reference(family, batch),
            two_turns(model, c, batch, prefill_chunk_size=chunk),
            strict=True,
        ):
            assert_same(expected, actual)
        report = c.report()
        assert report.used_bytes <= report.limit_bytes


@pytest.mark.parametrize("setting", ["flexgen", "kvswap", "kvswap-no-reuse", "exact"])
def test_real_disk(
    setting: str,
    tmp_path: Any,
    models: dict[str, PreTrainedModel],
    reference: Callable[[str, int], list[Any]],
) -> None:
    policy, options = SETTINGS[setting]
    with TieredCache(
        models["llama"], policy, store=tmp_path, max_tokens=160, batch_size=3, **options
    ) as tiers:
        actual = two_turns(models["llama"], tiers, 3, prefill_chunk_size=CHUNK)
        for expected, got in zip(reference("llama", 3), actual, strict=True):
            assert_same(expected, got)
        assert tiers.stats.decode.read_bytes > 0
        assert tiers.stats.prefill.written_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_small_budget_is_not_exact_by_accident(models: dict[str, PreTrainedModel]) -> None:
    """The check has teeth: selecting a few tokens changes the logits of the same model."""
    model = models["llama"]
    expected = generate(model, DynamicCache(config=model.config), prompts(1))
    policy = KVSwap(window_tokens=4, selected_tokens=8, reuse_tokens=8, rank=8)
    with TieredCache(model, policy, store="memory", max_tokens=160) as tiers:
        actual = generate(model, tiers, prompts(1))
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() > 100 * TOLERANCE
