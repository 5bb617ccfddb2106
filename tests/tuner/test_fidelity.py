"""Policies held to full attention on forced tokens."""

import pytest
import torch
from torch import Tensor

from penstock.core.errors import BudgetError, PromptError
from penstock.kernels.divergence import kl_divergence
from penstock.methods import FlexGen, Full, KVSwap
from penstock.methods.baselines.streaming_llm import StreamingLLM
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel, load
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.fidelity import KL_FLOOR, Reference

FORCED = 8


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("recall", dtype="float32")  # selections hang on the last bits of bfloat16


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> list[Tensor]:
    return calibration_tokens(loaded, [], tokens=1024, forced=FORCED)[:2]


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel, texts: list[Tensor]) -> Reference:
    return Reference(loaded.model, texts, forced=FORCED)


@pytest.fixture(scope="module")
def ends(texts: list[Tensor]) -> list[Tensor]:
    """Where it does not matter what the model can answer."""
    return [text[-400:] for text in texts]


@pytest.fixture(scope="module")
def short(loaded: LoadedModel, ends: list[Tensor]) -> Reference:
    return Reference(loaded.model, ends, forced=FORCED)


def test_everything_is_as_good_as_full_attention(short: Reference) -> None:
    for policy in (Full(), KVSwap(), FlexGen()):
        memory = "1/2" if policy.name == "flexgen" else None
        seen: list[int] = []
        found = short.measure(policy, memory=memory, progress=seen.append)
        assert seen == list(range(1, 2 * FORCED + 1))
        assert found.kl < 1e-3
        assert found.agreement > 0.95
        assert found.tokens == 2 * FORCED
        assert found.selections == ()


@pytest.mark.slow
def test_selections_pass_and_garbage_does_not(reference: Reference) -> None:
    good = reference.measure(KVSwap(selected_tokens=100), memory="1/4")
    bad = reference.measure(KVSwap(selected_tokens=64, rank=2, group_tokens=16), memory="1/4")
    blind = reference.measure(StreamingLLM(), memory="1/7")
    assert good.kl < KL_FLOOR < min(bad.kl, blind.kl)
    assert good.agreement > max(bad.agreement, blind.agreement)
    assert 0 < good.hit_rate < 1
    assert good.read_bytes_per_token > 0


def test_figures_are_those_of_a_run_by_hand(
    loaded: LoadedModel, ends: list[Tensor], short: Reference
) -> None:
    policy = KVSwap(selected_tokens=40, rank=16, group_tokens=8)
    found = short.measure(policy, memory="1/3", record=True)
    distances, same, largest, wanted, hit = [], 0, 0, 0, 0
    for text in ends:
        with torch.no_grad():
            full = torch.log_softmax(loaded.model(text[None]).logits[0].float(), dim=-1)
        with TieredCache(loaded.model, policy, "1/3", "memory", max_tokens=len(text)) as cache:
            for start, end in [
                (0, 300), (300, len(text) - FORCED),
                *((at, at + 1) for at in range(len(text) - FORCED, len(text))),
            ]:  # fmt: skip
                with torch.no_grad():
                    logits = loaded.model(
                        text[None, start:end], **cache_argument(loaded.model, cache)
                    ).logits
                if end - start == 1:
                    said = torch.log_softmax(logits[:, -1].float(), dim=-1)
                    distances.append(kl_divergence(full[start][None], said))
                    same += int(full[start].argmax() == said.argmax())
            largest = max(largest, cache.report().used_bytes)
            wanted += cache.stats.decode.units_wanted
            hit += cache.stats.decode.units_hit
    by_hand = torch.cat(distances)
    assert found.kl == pytest.approx(float(by_hand.mean()), rel=0.02, abs=1e-4)
    assert found.kl_p90 == pytest.approx(float(by_hand.quantile(0.9)), rel=0.02, abs=1e-4)
    assert found.agreement == pytest.approx(same / len(by_hand), abs=1.01 / len(by_hand))
    assert found.resident_bytes == largest
    assert found.hit_rate == pytest.approx(hit / wanted, abs=0.02)
    assert [recording.shares.shape[0] for recording in found.selections] == [FORCED, FORCED]


def test_windows_stay_windows() -> None:
    """A model with sliding windows: every cache starts from the same ones."""
    model = tiny_model("gemma3")
    draw = torch.Generator().manual_seed(2)
    text = torch.randint(3, VOCABULARY, (120,), generator=draw)
    seen: list[int] = []
    reference = Reference(model, [text, text[:100]], forced=9, chunk=50, progress=seen.append)
    assert seen[-1] == 220
    assert seen == sorted(seen)
    for _ in range(2):
        found = reference.measure(Full(), memory=None)
        assert found.kl < 1e-6
        assert found.agreement == 1


def test_refusals(loaded: LoadedModel, texts: list[Tensor], reference: Reference) -> None:
    with pytest.raises(BudgetError, match="too little"):
        reference.measure(KVSwap(), memory="1/999")
    with pytest.raises(PromptError, match="0 tokens"):
        Reference(loaded.model, [], forced=FORCED)
    with pytest.raises(PromptError, match="41 tokens; with 8"):
        Reference(loaded.model, [texts[0], texts[0][:41]], forced=FORCED)
