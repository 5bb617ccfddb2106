"""A cache that goes on behind a stored past answers as the one whose prefill was stored."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import ConfigError, KVSwap, TieredCache
from penstock.core.errors import CacheStateError, FetchError
from penstock.engine.stored_past import StoredPast, padded_units
from penstock.methods import POLICIES, FlexGen, SelectionPolicy
from penstock.methods.kvswap.stored_index import VALUE_SUM
from penstock.models.cache_argument import cache_argument
from penstock.storage.memory_file import MemoryFile
from penstock.testing.tiny_models import VOCABULARY, tiny_model

GROUP = 8
DOCUMENT = 110  # the last group holds 6 tokens
QUESTION = 11
NEW = 10
MAX_TOKENS = 160
SWAP = KVSwap(group_tokens=GROUP, window_tokens=16, selected_tokens=48, rank=32, index_bits=8)


def ids(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, count), generator=generator)


TEXT = ids(DOCUMENT)
LOOKS_BACK = ("hillinfer", "infinigen", "infinigen-star", "infinigen-star-reuse", "kvswap")
"""Methods that learn from queries and attention of the prefill, which here are the question's."""


def open_cache(model: PreTrainedModel, policy: SelectionPolicy, **kwargs: Any) -> TieredCache:
    return TieredCache(
        model, policy, store="memory", max_tokens=MAX_TOKENS, **kwargs,
    )  # fmt: skip


def read(model: Any, cache: TieredCache, tokens: Tensor) -> None:
    with torch.no_grad():
        model(tokens, **cache_argument(model, cache), use_cache=True)


def store(cache: TieredCache, length: int, group_tokens: int = GROUP) -> StoredPast:
    """What a document keeps of a cache."""
    runtime, shape = cache.tiers, cache._settings.shape
    files, states = [], []
    empty = StoredPast(
        shape=shape, files=[MemoryFile()] * shape.num_layers, group_tokens=group_tokens, length=1,
        unit_of_group=np.zeros(1, dtype=np.int64), num_units=1,
    )  # fmt: skip
    for layer in range(shape.num_layers):
        tokens = runtime.read_tokens(layer, 0, length)[0]
        rows = padded_units(tokens, group_tokens, empty.padded_bytes)
        file = MemoryFile()
        # Units need not lie in the order of their groups.
        file.write_at(0, np.ascontiguousarray(rows[::-1]).reshape(-1))
        files.append(file)
        states.append(runtime.index_state(layer))
    groups = len(rows)
    return replace(
        empty, files=files, unit_of_group=np.arange(groups)[::-1].astype(np.int64).copy(),
        num_units=groups, length=length, index_state=lambda layer: states[layer],
    )  # fmt: skip


def ask(model: Any, cache: TieredCache, question: Tensor, past: Tensor = TEXT) -> Any:
    rows = len(question)
    tokens = torch.cat([past.expand(rows, -1), question], dim=1)
    return model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), **cache_argument(model, cache),
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


def logits(out: Any) -> Tensor:
    return torch.stack(out.logits)


def made(name: str) -> SelectionPolicy:
    wanted = {"group_tokens": GROUP, "window_tokens": 16, "selected_tokens": 48, "sink_tokens": 4}
    known = {field.name for field in fields(POLICIES[name])}
    chosen: dict[str, Any] = {key: value for key, value in wanted.items() if key in known}
    try:
        return POLICIES[name](**chosen)
    except ConfigError:  # a method of single tokens
        return POLICIES[name](**{**chosen, "group_tokens": 1})


def stored_by(model: PreTrainedModel, policy: SelectionPolicy, **kwargs: Any) -> StoredPast:
    with open_cache(model, policy, prompt_tokens=DOCUMENT, **kwargs) as cache:
        read(model, cache, TEXT)
        return store(cache, DOCUMENT)


def fresh(model: PreTrainedModel, policy: SelectionPolicy, question: Tensor, **kwargs: Any) -> Any:
    with open_cache(model, policy, prompt_tokens=DOCUMENT, **kwargs) as cache:
        read(model, cache, TEXT)
        return ask(model, cache, question)


@pytest.mark.parametrize(
    ("family", "sinks", "reuse"),
    [
        ("llama", 0, None), ("qwen3", 16, 0), ("opt", 16, None), ("gpt_neox", 0, 0),
    ],
)  # fmt: skip
def test_shared_units_and_a_kept_index(family: str, sinks: int, reuse: int | None) -> None:
    model = tiny_model(family)
    policy = replace(SWAP, sink_tokens=sinks, reuse_tokens=reuse)
    question = ids(QUESTION, seed=1)
    expected = fresh(model, policy, question)
    past = stored_by(model, policy)
    with open_cache(model, policy, past=past) as cache:
        assert cache._settings.shares_past
        assert cache.get_seq_length() == DOCUMENT
        got = ask(model, cache, question)
        written = cache.stats.prefill.written_bytes + cache.stats.decode.written_bytes
    assert torch.equal(expected.sequences, got.sequences)
    assert (logits(expected) - logits(got)).abs().max() <= 1e-5
    closed = (DOCUMENT + QUESTION + NEW - 1) // GROUP - DOCUMENT // GROUP
    assert written == closed * past.padded_bytes * past.shape.num_layers, "the answer, nothing else"


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llama_past(llama: PreTrainedModel) -> StoredPast:
    return stored_by(llama, SWAP)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_goes_on_behind_what_another_stored(
    name: str, llama: PreTrainedModel, llama_past: StoredPast
) -> None:
    policy = made(name)
    if policy.drops:
        pytest.skip("forgets: what it drops depends on the attention of its own prefill")
    question = ids(QUESTION, seed=2)
    expected = fresh(llama, policy, question)
    past = replace(llama_past, index_state=lambda layer: None)
    with open_cache(llama, policy, past=past, prompt_tokens=DOCUMENT) as cache:
        for layer in range(past.shape.num_layers):
            cache.tiers.index_state(layer)  # makes it, as early as the other one's
        got = ask(llama, cache, question)
    assert (logits(expected)[0] - logits(got)[0]).abs().max() <= 1e-4, (
        "the question is read exactly"
    )
    if name not in LOOKS_BACK:
        assert torch.equal(expected.sequences, got.sequences)
        assert (logits(expected) - logits(got)).abs().max() <= 1e-4


@pytest.mark.parametrize("index", [True, False], ids=["kept", "made again"])
def test_the_index_is_the_same_kept_or_made_from_the_keys(index: bool) -> None:
    model = tiny_model("llama")
    with open_cache(model, SWAP) as cache:
        read(model, cache, TEXT)
        cache.tiers.layers[0].make_index()
        past = store(cache, DOCUMENT)
    if not index:
        past = replace(past, index_state=lambda layer: None)
    expected = fresh(model, SWAP, ids(QUESTION, seed=3))
    with open_cache(model, SWAP, past=past) as cache:
        got = ask(model, cache, ids(QUESTION, seed=3))
    # The basis is made from the document alone or with the question behind it: nearly the same.
    assert torch.equal(expected.sequences[:, : DOCUMENT + QUESTION], got.sequences[:, :-NEW])
    assert (logits(expected)[0] - logits(got)[0]).abs().max() <= 1e-4


MEAN = replace(SWAP, tail="mean")


@pytest.fixture(scope="module")
def summed_past(llama: PreTrainedModel) -> StoredPast:
    """With the sum of values."""
    return stored_by(llama, MEAN)


@pytest.fixture(scope="module")
def summed_answer(llama: PreTrainedModel) -> Any:
    return fresh(llama, MEAN, ids(QUESTION, seed=3))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "of an older document"])
def test_the_sum_of_values_is_kept_or_made_from_the_values(
    kept: bool, llama: PreTrainedModel, summed_past: StoredPast, summed_answer: Any
) -> None:
    question, past, expected = ids(QUESTION, seed=3), summed_past, summed_answer
    older = [dict(past.index_state(layer) or {}) for layer in range(past.shape.num_layers)]
    assert all(state.pop(VALUE_SUM).any() for state in older)
    if not kept:
        past = replace(past, index_state=lambda layer: older[layer])
    with open_cache(llama, MEAN, past=past) as cache:
        got = ask(llama, cache, question)
        read_bytes = cache.stats.decode.read_bytes
    assert torch.equal(expected.sequences, got.sequences)
    assert (logits(expected) - logits(got)).abs().max() <= 1e-5
    with open_cache(llama, MEAN, past=summed_past) as cache:
        ask(llama, cache, question)
        more = read_bytes - cache.stats.decode.read_bytes
    assert (more == 0) if kept else (more >= DOCUMENT // GROUP * past.unit_bytes)


def test_a_sum_of_values_does_not_trouble_who_wants_none(
    llama: PreTrainedModel, summed_past: StoredPast
) -> None:
    question = ids(QUESTION, seed=3)
    with open_cache(llama, SWAP, past=summed_past) as cache:
        got = ask(llama, cache, question)
    assert torch.equal(fresh(llama, SWAP, question).sequences, got.sequences)


def test_exact_mode_and_flexgen() -> None:
    model = tiny_model("qwen3")
    question = ids(QUESTION, seed=4)
    past = stored_by(model, SWAP)
    flexgen = FlexGen(group_tokens=GROUP)
    for policy, kwargs in ((SWAP, {"exact": True}), (flexgen, {})):
        expected = fresh(model, policy, question, **kwargs)
        with open_cache(model, policy, past=past, **kwargs) as cache:
            assert cache._settings.shares_past
            got = ask(model, cache, question)
        assert torch.equal(expected.sequences, got.sequences)


def test_forks_do_not_see_each_other_and_the_past_stays_as_it_was(
    llama: PreTrainedModel, llama_past: StoredPast
) -> None:
    model, past = llama, llama_past
    before = [past.read(layer, 0, past.num_groups) for layer in range(past.shape.num_layers)]
    questions = [ids(QUESTION, seed=seed) for seed in (5, 6, 7)]
    alone = []
    for question in questions:
        with open_cache(model, SWAP, past=past) as cache:
            alone.append(ask(model, cache, question).sequences)
    forks = [open_cache(model, SWAP, past=past) for _ in questions]
    try:
        together = [ask(model, fork, q).sequences for fork, q in zip(forks, questions, strict=True)]
    finally:
        for fork in reversed(forks):
            fork.close()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    after = [past.read(layer, 0, past.num_groups) for layer in range(past.shape.num_layers)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_one_cache_is_cropped_back_and_asked_again(
    llama: PreTrainedModel, llama_past: StoredPast
) -> None:
    model, past = llama, llama_past
    with open_cache(model, SWAP, past=past) as cache:
        first = ask(model, cache, ids(QUESTION, seed=5)).sequences
        cache.crop(DOCUMENT)
        ask(model, cache, ids(QUESTION, seed=6))
        cache.crop(DOCUMENT)
        again = ask(model, cache, ids(QUESTION, seed=5)).sequences
    assert torch.equal(first, again)


def test_a_batch_of_questions_shares_the_units(
    llama: PreTrainedModel, llama_past: StoredPast
) -> None:
    model, past = llama, llama_past
    questions = torch.cat([ids(QUESTION, seed=seed) for seed in (5, 6, 7)])
    with open_cache(model, SWAP, past=past, batch_size=3) as cache:
        together = ask(model, cache, questions)
    for row, question in enumerate(questions):
        with open_cache(model, SWAP, past=past) as cache:
            alone = ask(model, cache, question[None]).sequences[0]
        assert torch.equal(alone, together.sequences[row])


def test_reset_forgets_the_past_and_never_writes_over_it(
    llama: PreTrainedModel, llama_past: StoredPast
) -> None:
    model, past = llama, llama_past
    before = past.read(0, 0, past.num_groups)
    with open_cache(model, SWAP, past=past) as cache:
        cache.reset()
        read(model, cache, ids(60, seed=8))
        assert cache.get_seq_length() == 60
    assert torch.equal(before, past.read(0, 0, past.num_groups))


def test_a_part_of_the_past_and_then_more_of_it(
    llama: PreTrainedModel, llama_past: StoredPast
) -> None:
    """What a repair does: tokens of a damaged range are computed again, the rest is shared."""
    model, past = llama, llama_past
    start, end = 5 * GROUP, 9 * GROUP
    shorter = replace(past, index_state=lambda layer: None)
    with open_cache(model, SWAP, exact=True, past=None) as cache:
        read(model, cache, TEXT)
        whole = cache.tiers.read_tokens(1, 0, DOCUMENT)
    with open_cache(model, SWAP, exact=True, past=shorter) as cache:
        cache.crop(start)
        read(model, cache, TEXT[:, start:end])
        cache.tiers.restore(1, DOCUMENT)
        assert cache.get_seq_length() == DOCUMENT
        mended = cache.tiers.read_tokens(1, 0, DOCUMENT)
    assert (whole - mended).abs().max() <= 1e-5


def test_another_shape_is_refused(llama_past: StoredPast) -> None:
    with pytest.raises(ConfigError, match="head_dim=12"):
        open_cache(tiny_model("qwen3"), SWAP, past=llama_past)


def test_an_index_of_other_settings_is_refused() -> None:
    model = tiny_model("llama")
    with open_cache(model, SWAP) as cache:
        read(model, cache, TEXT)
        ask(model, cache, ids(QUESTION))
        cache.crop(DOCUMENT)
        past = store(cache, DOCUMENT)
    assert past.index_state(0) is not None
    with pytest.raises(ConfigError, match="other rank or bits"):
        open_cache(model, replace(SWAP, rank=16), past=past)
    read(model, open_cache(model, SWAP), TEXT)  # the model works on


def test_policies_that_forget_cannot_be_stored() -> None:
    model = tiny_model("llama")
    with open_cache(model, made("h2o")) as cache:
        read(model, cache, TEXT)
        with pytest.raises(CacheStateError, match="cannot be read back"):
            cache.tiers.read_tokens(0, 0, GROUP)


def test_a_past_that_cannot_be_read_gives_the_model_back() -> None:
    model = tiny_model("llama")
    past = stored_by(model, SWAP)
    past.files[1].close()
    with pytest.raises(FetchError):
        open_cache(model, SWAP, past=past)
    assert model.config._attn_implementation != "penstock"
