"""verify=K: drafts under any policy, and the tokens of full attention all the same."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from penstock.core.errors import ConfigError
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.generation.engine import LLM
from penstock.generation.output import RequestOutput
from penstock.generation.sampler import Sampler, SamplingRow
from penstock.generation.sampling import SamplingParams
from penstock.methods import POLICIES
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_chat import tiny_chat_model
from penstock.testing.tiny_models import VOCABULARY, tiny_model

PROMPTS = [
    torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    for count in (131, 90)
]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.5, seed=11, max_tokens=9, ignore_eos=True)
FEW = replace(GREEDY, max_tokens=6)
KEPT = [name for name, policy in POLICIES.items() if not policy.drops and policy.retrieves]


def policy_of(name: str) -> Any:
    selected = 8 if name == "kvswap" else 16
    return POLICIES[name](selected_tokens=selected)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[bool, list[list[int]]]:
    """What full attention says, greedy and sampled."""
    llm = LLM(model, policy="full", memory=None, store="memory")
    return {
        is_greedy: [each.token_ids for each in llm.generate(PROMPTS, params)]
        for is_greedy, params in ((True, GREEDY), (False, SAMPLED))
    }


def verified(model: Any, name: str, drafts: int, **options: Any) -> LLM:
    options = {"memory": None, "store": "memory", **options}
    return LLM(model, policy=policy_of(name), verify=drafts, **options)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [each.token_ids for each in outputs]


@pytest.mark.parametrize("name", KEPT)
def test_tokens_are_those_of_full_attention(
    name: str, model: PreTrainedModel, expected: dict[bool, list[list[int]]]
) -> None:
    """A batch of two of different lengths, under every policy that drops nothing."""
    outputs = verified(model, name, 3).generate(PROMPTS, FEW)
    assert ids_of(outputs) == [ids[: FEW.max_tokens] for ids in expected[True]]
    found = outputs[0].run.verified
    assert found is not None
    assert found.accepted <= found.drafted
    assert name != "kvswap" or found.accepted < found.drafted, "the test shows something"
    assert found.passes + found.accepted == FEW.max_tokens - 1  # type: ignore[operator]
    assert found.tokens == 2 * (FEW.max_tokens - 1)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["kvswap", "louiskv"])
def test_sampled_tokens_are_those_of_full_attention_by_the_same_seed(
    name: str, model: PreTrainedModel, expected: dict[bool, list[list[int]]]
) -> None:
    assert ids_of(verified(model, name, 5).generate(PROMPTS, SAMPLED)) == expected[False]


def test_a_seed_of_the_model_holds_for_a_batch_of_one(model: PreTrainedModel) -> None:
    params = replace(SAMPLED, seed=None)
    options: dict[str, Any] = {"memory": None, "store": "memory", "seed": 3}
    plain = LLM(model, policy="full", **options).generate(PROMPTS[:1], params)
    assert ids_of(verified(model, "kvswap", 4, seed=3).generate(PROMPTS[:1], params)) == ids_of(
        plain
    )


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt_neox"])
def test_families(family: str) -> None:
    """Sliding windows that drafts have moved go back; learnt sinks; other rotations."""
    model = tiny_model(family)
    plain = LLM(model, policy="full", memory=None, store="memory").generate(PROMPTS, GREEDY)
    assert ids_of(verified(model, "kvswap", 6).generate(PROMPTS, GREEDY)) == ids_of(plain)


@settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_draft_anywhere(
    data: st.DataObject, model: PreTrainedModel, expected: dict[bool, list[list[int]]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Random lengths of drafts and answers, policies, stores, chunks and batches."""
    name = data.draw(st.sampled_from(["kvswap", "quest", "louiskv", "infinigen"]))
    drafts, most = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    store = data.draw(st.sampled_from(["memory", "host", str(tmp_path)]))
    if not policy_of(name).device_tier and store == "host":
        store = "memory"
    is_greedy, rows = data.draw(st.booleans()), data.draw(st.sampled_from([[0], [1], [0, 1]]))
    params = replace(GREEDY if is_greedy else SAMPLED, max_tokens=most)
    chunk = data.draw(st.integers(20, 110))
    llm = verified(model, name, drafts, store=store, prefill_chunk_size=chunk)
    outputs = llm.generate([PROMPTS[row] for row in rows], params)
    assert ids_of(outputs) == [expected[is_greedy][row][:most] for row in rows]


@pytest.mark.parametrize("exact_after", [True, False])
def test_the_cache_goes_on_as_if_nothing_had_been_drafted(
    exact_after: bool, model: PreTrainedModel
) -> None:
    """Store, window, pending units, index and slots: the next step under the policy is that of a
    cache that was fed the answer without drafts; so is an exact pass."""
    prompt, steps = PROMPTS[0], 11

    def made() -> TieredCache:
        return TieredCache(
            model, policy_of("kvswap"), None, "memory", max_tokens=256, prompt_tokens=len(prompt)
        )

    with made() as cache, made() as twin, torch.no_grad():
        llm = LLM(model, verify=7)
        params = replace(GREEDY, max_tokens=steps)
        [output] = llm.answer(llm.batch_of([prompt], params), params, cache)
        assert cache.get_seq_length() == len(prompt) + steps - 1
        new = torch.tensor([output.token_ids])
        for ids in (torch.tensor([prompt]), new[:, :-1]):
            model(ids, **cache_argument(model, twin))
        for layer in range(len(cache.tiers.layers)):
            held = [
                each.tiers.read_tokens(layer, 0, len(prompt) + steps - 1) for each in (cache, twin)
            ]
            torch.testing.assert_close(*held, rtol=1e-4, atol=1e-5)
        ids = new[:, -1:].expand(-1, 2 if exact_after else 1)
        logits = [model(ids, **cache_argument(model, each)).logits for each in (cache, twin)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


def test_a_pass_leaves_most_layers_their_slots(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It streams through memory that the last ones lend: drafts of the others read what they
    miss."""
    policy = KVSwap(selected_tokens=160, reuse_tokens=320, group_tokens=1, slot_bits=16)
    read = []
    for _ in range(2):
        llm = LLM(model, policy=policy, verify=3, memory=None, store="memory")
        [output] = llm.generate([PROMPTS[0] * 3], GREEDY)
        assert output.run.verified is not None
        read.append(output.run.verified.draft_bytes)
        monkeypatch.setattr(RetrievalLayer, "keeps_slots", False)
    assert read[0] < 0.8 * read[1]


# What a request may ask ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatty() -> Any:
    return tiny_chat_model(positions=512)


TEXT = "In the beginning there was a word, and the word was not yet a token of any model at all. "
REQUESTS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1, "max_tokens": 14},
    "stop strings": {"stop": ["a", "e", "Q"], "max_tokens": 40, "temperature": 1.2, "seed": 1},
    "end tokens": {"stop_token_ids": list(range(20, 45)), "max_tokens": 40, "temperature": 1.5,
                   "seed": 2, "min_tokens": 3},
    "several answers": {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 13},
    "best of": {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 5, "max_tokens": 14},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3,
                  "max_tokens": 16},
    "top k, p": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8, "seed": 3,
                 "max_tokens": 16},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize("asked", REQUESTS)
def test_everything_else_of_an_answer_is_exact_modes_too(asked: str, chatty: Any) -> None:
    """Texts, logprobs, reasons: whatever ends an answer within a draft ends it there."""
    params = SamplingParams(**{"temperature": 0, "ignore_eos": False, **REQUESTS[asked]})
    options: dict[str, Any] = {"memory": None, "store": "memory"}
    plain = LLM(chatty, policy=policy_of("kvswap"), exact=True, **options)
    checked = verified(chatty, "kvswap", 6)
    prompts = [TEXT, TEXT[::-1]]
    for mine, other in zip(
        checked.generate(prompts, params), plain.generate(prompts, params), strict=True
    ):
        for answer, wanted in zip(mine.outputs, other.outputs, strict=True):
            assert (answer.text, answer.token_ids) == (wanted.text, wanted.token_ids)
            assert answer.finish_reason == wanted.finish_reason
            assert answer.stop_reason == wanted.stop_reason
            assert (answer.logprobs is None) == (wanted.logprobs is None)
            for found, said in zip(answer.logprobs or [], wanted.logprobs or [], strict=True):
                assert {k: v.rank for k, v in found.items()} == {k: v.rank for k, v in said.items()}
                assert [v.logprob for v in found.values()] == pytest.approx(
                    [v.logprob for v in said.values()], abs=1e-3
                )


def test_streaming(chatty: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    llm = verified(chatty, "kvswap", 5)
    with llm.stream(TEXT * 2, params) as stream:
        news = list(stream)
    assert stream.outputs is not None
    assert list(chain(*(each.token_ids for each in news))) == stream.outputs[0].token_ids
    assert [len(each.token_ids) for each in news] == [1] * 21


def test_an_answer_that_is_stopped_leaves_all_but_its_last_token(model: PreTrainedModel) -> None:
    llm, params = LLM(model, verify=6), replace(GREEDY, max_tokens=30)
    for wanted in (1, 3, 8):
        asked: Iterator[int] = iter(range(1, 100))
        with TieredCache(model, policy_of("kvswap"), None, "memory", max_tokens=256) as cache:
            [output] = llm.answer(
                llm.batch_of([PROMPTS[0]], params), params, cache,
                should_stop=lambda: next(asked) == wanted,  # noqa: B023
            )  # fmt: skip
            assert (len(output.token_ids), output.finish_reason) == (wanted, "abort")
            assert cache.get_seq_length() == len(PROMPTS[0]) + wanted - 1


def test_a_listener_that_raises_leaves_a_cache_that_goes_on(model: PreTrainedModel) -> None:
    llm, params = LLM(model, verify=6), replace(GREEDY, max_tokens=16)
    left = 7

    def stop() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return False

    with TieredCache(model, policy_of("kvswap"), None, "memory", max_tokens=256) as cache:
        batch = llm.batch_of([PROMPTS[0]], params)
        with pytest.raises(KeyboardInterrupt):
            llm.answer(batch, params, cache, should_stop=stop)
        held = cache.get_seq_length()
        assert len(PROMPTS[0]) < held < len(PROMPTS[0]) + 8
        cache.crop(len(PROMPTS[0]) - 1)  # so that a single token is read before the first answer
        [again] = llm.answer(batch, params, cache)
    plain = LLM(model, policy="full", memory=None, store="memory")
    assert [again.token_ids] == ids_of(plain.generate(PROMPTS[:1], params))


# Sampling -----------------------------------------------------------------------------------------


def test_tokens_chosen_after_a_draft_keep_the_distribution() -> None:
    """Chi-square on six tokens: whatever the draft's distribution, the checked token has that of
    the exact logits, and agrees with the draft about as often as both allow."""
    exact = torch.tensor([[1.5, 0.3, -0.4, 0.9, -2.0, 0.0]])
    draft = torch.tensor([[0.9, 0.9, -0.1, 0.2, -1.0, 0.5]])
    sampler = Sampler(torch.Generator().manual_seed(8))
    row = SamplingRow(params=SamplingParams(temperature=0.9), prompt_token_ids=[1], noise={})
    count, agreed = 3000, 0
    counts = torch.zeros(6)
    for _ in range(count):
        [drafted] = sampler.tokens(draft, [row.ahead()])
        [choice] = sampler(exact, [row])
        row.output_token_ids.append(choice.token_id)
        counts[choice.token_id] += 1
        agreed += drafted == choice.token_id
    p, q = ((each[0] / 0.9).softmax(0) for each in (exact, draft))
    wanted = count * p
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 15.1  # 1 % of samples, 5 degrees
    overlap = float(torch.minimum(p, q).sum())
    assert overlap / (2 - overlap) - 0.02 < agreed / count < overlap + 0.02
    assert row.noise is not None
    assert len(row.noise) <= 2, "the noise of tokens that are taken is forgotten"


# What cannot be, and what need not be -------------------------------------------------------------


def test_policies_that_drop_are_refused(model: PreTrainedModel) -> None:
    llm = LLM(model, policy="snapkv", memory=None, store="memory", verify=3)
    with pytest.raises(ConfigError, match="snapkv drops tokens"):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("options", [{"verify": 0}, {"verify": 2, "exact": True}])
def test_settings_that_make_no_sense(model: PreTrainedModel, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="verify"):
        LLM(model, **options)


def test_where_every_step_is_exact_a_notice_says_so(
    model: PreTrainedModel, expected: dict[bool, list[list[int]]]
) -> None:
    outputs = LLM(model, policy="full", memory=None, store="memory", verify=4).generate(
        PROMPTS, GREEDY
    )
    assert ids_of(outputs) == expected[True]
    assert any("verify changes nothing" in each for each in outputs[0].run.notices)
    assert outputs[0].run.verified is not None
    assert outputs[0].run.verified.passes == 0


def test_the_report_has_bytes_and_times(model: PreTrainedModel, tmp_path: Path) -> None:
    seen: list[int] = []
    llm = verified(model, "kvswap", 5, store=str(tmp_path))
    [output] = llm.generate(PROMPTS[:1], GREEDY, on_progress=lambda done, total: seen.append(done))
    assert max(seen) == len(PROMPTS[0]), "passes over drafts are no progress of the prompt"
    run, found = output.run, output.run.verified
    assert found is not None
    assert run.stats.verify.steps == found.passes
    assert run.stats.decode.steps == found.drafted
    assert found.pass_bytes == run.stats.verify.read_bytes > 0
    assert found.draft_bytes == run.stats.decode.read_bytes > 0
    assert found.exact_bytes_per_token == found.pass_bytes / found.passes
    assert found.bytes_per_token == (found.pass_bytes + found.draft_bytes) / found.tokens
    assert found.seconds_per_pass > 0
    assert found.seconds_per_token > 0
    assert found.as_dict()["tokens_per_pass"] == 1 + found.accepted / found.passes
