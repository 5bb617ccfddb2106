"""TextDocument: a cache filled with a prefix of a text is one that has read that prefix."""

import pytest
import torch
from torch import Tensor

from penstock.methods import FlexGen, Full, KVSwap, SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from penstock.tuner.text_document import TextDocument
from penstock.workloads.prefilled import PrefilledText

TOKENS, MORE, BATCH = 120, 6, 2
EVERYTHING = KVSwap(selected_tokens=200, reuse_tokens=0, rank=32, index_bits=16)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def ids() -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (1, TOKENS), generator=draw)


@pytest.fixture(scope="module")
def text(model: CausalLM, ids: Tensor) -> PrefilledText:
    return PrefilledText(model, ids, chunk=50)


def following(seed: int = 9) -> Tensor:
    """Other tokens for each row. [BATCH, MORE]"""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (BATCH, MORE), generator=draw)


def plain(model: CausalLM, ids: Tensor, tokens: int) -> Tensor:
    """Logits of the plain model at the tokens that follow. [BATCH, MORE, vocabulary]"""
    whole = torch.cat([ids[:, :tokens].expand(BATCH, -1), following()], dim=1)
    with torch.no_grad():
        return torch.as_tensor(model(whole).logits[:, tokens:])


def decoded(model: CausalLM, cache: TieredCache, tokens: int) -> Tensor:
    """The same, a token at a time through a cache."""
    out = []
    for at in range(MORE):
        position = torch.full((BATCH, 1), tokens + at)
        with torch.no_grad():
            step = model(
                following()[:, at : at + 1], **cache_argument(model, cache), position_ids=position
            )
        out.append(step.logits)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize(
    ("policy", "memory", "store", "tokens"),
    [
        (Full(), None, "memory", 61), (FlexGen(), "1MiB", "nvme", TOKENS),
        (FlexGen(), "1MiB", "nvme", 1), (KVSwap(), None, "memory", 61),
        (EVERYTHING, None, "nvme", TOKENS), (EVERYTHING, None, "nvme", 61),
        (EVERYTHING, None, "nvme", 1),
    ],
    ids=[
        "full", "flexgen", "flexgen, a token", "resident", "selects everything",
        "selects everything of a part", "selects everything of a token",
    ],
)  # fmt: skip
def test_a_cache_goes_on_as_the_plain_model(
    model: CausalLM, ids: Tensor, text: PrefilledText, policy: SelectionPolicy,
    memory: str | None, store: str, tokens: int,
) -> None:  # fmt: skip
    document = TextDocument(text, BATCH)
    expected = plain(model, ids, tokens)
    for _ in range(2):  # the text is not used up
        with TieredCache(
            model, policy, memory, store, max_tokens=TOKENS + MORE, batch_size=BATCH
        ) as cache:
            document.fill(cache, tokens)
            assert cache.get_seq_length() == tokens
            said = decoded(model, cache, tokens)
        torch.testing.assert_close(said, expected, atol=2e-4, rtol=2e-4)
    assert text.length == TOKENS


def test_a_cache_of_another_text_says_something_else(
    model: CausalLM, ids: Tensor, text: PrefilledText
) -> None:
    """The comparison above can tell: a token more or fewer in front changes every logit."""
    expected = plain(model, ids, 61)
    with TieredCache(model, Full(), max_tokens=TOKENS + MORE, batch_size=BATCH) as cache:
        TextDocument(text, BATCH).fill(cache, 60)
        said = decoded(model, cache, 61)
    assert (said - expected).abs().amax(-1).min() > 1e-2


def test_a_simulated_device_takes_it_for_nothing_and_is_itself_again(
    model: CausalLM, text: PrefilledText
) -> None:
    seen: list[float] = []
    rates: list[float] = []
    policy = KVSwap(selected_tokens=16, reuse_tokens=16, rank=8, index_bits=8)
    with TieredCache(
        model, policy, None, "emmc", max_tokens=TOKENS + MORE, batch_size=BATCH
    ) as cache:

        def told(share: float) -> None:
            store = cache.tiers._store
            assert store is not None
            assert store.throttle is not None
            seen.append(share)
            rates.append(store.throttle.profile.iops)

        TextDocument(text, BATCH).fill(cache, TOKENS, progress=told)
        told(1.0)
        assert min(rates[:-1]) > 1e9
        assert rates[-1] == 8e3
        assert decoded(model, cache, TOKENS).isfinite().all()
        assert cache.stats.decode.reads > 0
        assert cache.report().used_bytes <= cache.plan.total_bytes
    assert seen == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


def test_no_more_than_there_is(model: CausalLM, text: PrefilledText) -> None:
    with (
        TieredCache(model, Full(), max_tokens=2 * TOKENS, batch_size=BATCH) as cache,
        pytest.raises(AssertionError),
    ):
        TextDocument(text, BATCH).fill(cache, TOKENS + 1)
