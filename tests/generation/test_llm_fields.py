"""Every field of an answer is that of the plain model's logits, row by row in one batch."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from penstock.core.errors import BudgetError, ConfigError
from penstock.generation.engine import LLM
from penstock.generation.logprobs import TopTokens, position_of
from penstock.generation.output import CompletionOutput, RequestOutput
from penstock.generation.sampling import SamplingParams
from penstock.methods import POLICIES
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import LoadedModel
from penstock.testing.tiny_chat import tiny_chat_model
from penstock.testing.tiny_models import tiny_model
from tests.generation.plain_sampling import drawn, probabilities_of, scores_of

PROMPTS = ["The capital of France is", "A robot may not injure", "To be"]
WORDS = ["e", " t", "the"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_chat_model()


@pytest.fixture(scope="module")
def llm(loaded: LoadedModel) -> LLM:
    return LLM(loaded, memory=None, store="memory", prefill_chunk_size=7)


@torch.no_grad()
def plain_logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """float32 [tokens, vocabulary]"""
    model: Any = loaded.model
    logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def check_answer(
    loaded: LoadedModel, prompt: list[int], answer: CompletionOutput, params: SamplingParams
) -> None:
    """Each token is the reference's, of the plain model's logits behind those in front of it."""
    tokenizer: Any = loaded.tokenizer
    words = [
        list(ids)
        for word in params.bad_words or ()
        for text in (word.lstrip(), f" {word.lstrip()}")
        if (ids := tokenizer(text, add_special_tokens=False)["input_ids"])
        and (text == word.lstrip() or len(ids) == len(word.lstrip()))
    ]
    seed = None if params.seed is None else params.seed + answer.index
    generator = torch.Generator().manual_seed(seed or 0)
    ends = frozenset([tokenizer.eos_token_id, *(params.stop_token_ids or ())])
    every = plain_logits(loaded, [*prompt, *answer.token_ids])
    for at, token in enumerate(answer.token_ids):
        raw = every[len(prompt) - 1 + at].tolist()
        before = answer.token_ids[:at]
        scores = scores_of(raw, params, prompt, before, words=words, ends=ends)
        if params.is_greedy:
            assert token == max(range(len(scores)), key=scores.__getitem__)
        elif seed is not None:
            assert token == drawn(probabilities_of(scores, params), generator)
        else:
            assert probabilities_of(scores, params)[token] > 0


MIXED = [
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0.8, top_k=9, seed=4, max_tokens=9, presence_penalty=1.5),
    SamplingParams(temperature=0, max_tokens=3, repetition_penalty=2.5, bad_words=WORDS),
    SamplingParams(n=3, temperature=1.2, top_p=0.7, seed=8, max_tokens=6, frequency_penalty=0.9),
    SamplingParams(temperature=1.5, min_p=0.05, seed=1, max_tokens=7, min_tokens=7,
                   logit_bias={1: 50.0, 40: 2.0}),
    SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[*range(60, 90)]),
    SamplingParams(temperature=0.7, max_tokens=8, ignore_eos=True, logit_bias={1: 30.0}),
]  # fmt: skip


def test_each_prompt_has_its_own_settings(loaded: LoadedModel, llm: LLM) -> None:
    prompts = [PROMPTS[i % 3] for i in range(len(MIXED))]
    outputs = llm.generate(prompts, MIXED)
    assert [each.prompt for each in outputs] == prompts
    assert len({each.run.new_tokens for each in outputs}) == 1
    for output, params in zip(outputs, MIXED, strict=True):
        assert [each.index for each in output.outputs] == list(range(params.n))
        for answer in output.outputs:
            assert (answer.finish_reason, answer.stop_reason) == ("length", None)
            assert len(answer.token_ids) == params.max_tokens
            check_answer(loaded, output.prompt_token_ids, answer, params)
    assert {1} == set(outputs[6].token_ids), "the end token was ignored, and wanted"


def test_an_answer_does_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = [PROMPTS[i % 3] for i in range(len(MIXED))]
    seeded = [i for i, each in enumerate(MIXED) if each.is_greedy or each.seed is not None]
    together = llm.generate(prompts, MIXED)
    for i in seeded:
        [alone] = llm.generate([prompts[i]], [MIXED[i]])
        assert [each.token_ids for each in alone.outputs] == [
            each.token_ids for each in together[i].outputs
        ]


@pytest.mark.parametrize("count", [0, 2, -1])
def test_logprobs_are_those_of_the_plain_model(loaded: LoadedModel, llm: LLM, count: int) -> None:
    params = SamplingParams(
        temperature=1.3, seed=3, max_tokens=6, logprobs=count, prompt_logprobs=count,
        repetition_penalty=1.9, min_p=0.01,
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, [params, SamplingParams(max_tokens=2), params])
    assert outputs[1].prompt_logprobs is None
    assert outputs[1].outputs[0].logprobs is None
    assert outputs[1].outputs[0].cumulative_logprob is None
    for output in (outputs[0], outputs[2]):
        check_logprobs(loaded, output, count)


def check_logprobs(loaded: LoadedModel, output: RequestOutput, count: int) -> None:
    tokenizer: Any = loaded.tokenizer
    prompt, [answer] = output.prompt_token_ids, output.outputs
    told: list[Any] = [*(output.prompt_logprobs or ()), *(answer.logprobs or ())]
    tokens = [*prompt, *answer.token_ids]
    assert len(told) == len(tokens)
    assert told[0] is None
    plain = plain_logits(loaded, tokens).double().log_softmax(dim=-1)
    total = 0.0
    for at in range(1, len(tokens)):
        row, token = plain[at - 1], tokens[at]
        values = row.sort(descending=True).values
        width = len(values) if count < 0 else count
        assert next(iter(told[at])) == token
        ranks = sorted(said.rank for said in told[at].values())
        assert ranks[:width] == list(range(1, width + 1))
        assert width <= len(told[at]) <= width + 1
        for each, said in told[at].items():
            assert said.logprob == pytest.approx(float(row[each]), abs=1e-4)
            near = [
                int((values > row[each] + 1e-4).sum()) + 1,
                int((values >= row[each] - 1e-4).sum()),
            ]
            assert near[0] <= said.rank <= near[1], "its place, as far as there is no tie"
            text = tokenizer.decode([each])
            if not text.endswith("\ufffd"):
                assert said.decoded_token == text
        total += told[at][token].logprob if at >= len(prompt) else 0.0
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-6)


def test_parts_of_a_character_have_no_text_but_the_last() -> None:
    """As in vLLM: a whole character stands beside the token that completes it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("a€b")["input_ids"]
    texts = [
        position_of(TopTokens(token, -1.0, 1, [], []), ids[:at], tokenizer)[token].decoded_token
        for at, token in enumerate(ids)
    ]
    assert texts == ["a", "", "", "€", "b"]
    last = TopTokens(ids[3], -1.0, 2, [ids[4], ids[1]], [-0.5, -2.0])
    position = position_of(last, ids[:3], tokenizer)
    assert [each.decoded_token for each in position.values()] == ["€", "b", ""]
    assert [each.rank for each in position.values()] == [2, 1, 2]


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_answers_of_a_prompt_share_its_prefill(family: str) -> None:
    """Also where layers keep a sliding window; the plain model repeats the prompt."""
    model = tiny_model(family)
    llm = LLM(model, memory=None, store="memory", prefill_chunk_size=16)
    prompts = [list(range(5, 55)), list(range(20, 33))]
    params = [
        SamplingParams(n=4, temperature=1.1, seed=6, max_tokens=5),
        SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=7),
    ]
    outputs = llm.generate(prompts, params)
    run = outputs[0].run
    assert run.prompt_tokens == 63
    assert run.decode_tokens == run.new_tokens - 6
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        alone = [
            llm.generate([prompt], SamplingParams(
                temperature=each.temperature, seed=(each.seed or 0) + i, max_tokens=each.max_tokens
            ))[0].token_ids for i in range(each.n)
        ]  # fmt: skip
        assert [answer.token_ids for answer in output.outputs] == alone
        assert len(set(map(tuple, alone))) == each.n


def test_the_prompt_is_read_once_for_all_answers() -> None:
    model = tiny_model("llama")
    seen: list[tuple[int, ...]] = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    try:
        llm = LLM(model, memory=None, store="memory", prefill_chunk_size=16)
        llm.generate([list(range(5, 45))], SamplingParams(n=3, max_tokens=3))
    finally:
        hook.remove()
    assert seen[-5:] == [(1, 16), (1, 16), (1, 8), (3, 1), (3, 1)]


@pytest.mark.parametrize("policy", ["kvswap", "quest", "infinigen", "clusterkv", "dynakv", "full"])
def test_a_budget_for_all_answers_is_not_spent_on_the_prompt(policy: str) -> None:
    """The plan for a prompt alone would be another one, under which its answers do not fit."""
    settings: dict[str, Any] = {} if policy == "full" else {"selected_tokens": 40}
    llm = LLM(
        tiny_model("llama"), policy=POLICIES[policy](**settings), store="memory",
        prefill_chunk_size=64,
    )  # fmt: skip
    params = SamplingParams(n=3, seed=5, max_tokens=4)
    [output] = llm.generate([[5 + i % 150 for i in range(200)]], params)
    assert [len(each.token_ids) for each in output.outputs] == [4, 4, 4]
    assert output.run.stats.prefill.tokens == 200
    assert not any("once for each answer" in notice for notice in output.run.notices)


def test_where_nothing_can_be_forked_the_prompt_is_read_for_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(tiny_model("llama"), memory=None, store="memory", prefill_chunk_size=16)
    prompts = [list(range(5, 45)), list(range(9, 30))]
    params = [
        SamplingParams(n=2, seed=3, max_tokens=5, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=4),
    ]
    forked = llm.generate(prompts, params)

    def refuses(self: TieredCache, indices: Tensor) -> None:
        raise BudgetError("too small", needed_bytes=1)

    monkeypatch.setattr(TieredCache, "batch_select_indices", refuses)
    read = llm.generate(prompts, params)
    assert "prompts were read once for each answer" in " ".join(read[0].run.notices)
    assert [[each.token_ids for each in output.outputs] for output in read] == [
        [each.token_ids for each in output.outputs] for output in forked
    ]
    assert read[0].prompt_logprobs is not None
    assert len(read[0].prompt_logprobs) == 40


def test_the_best_of_several_answers(loaded: LoadedModel, llm: LLM) -> None:
    fields: Any = {"temperature": 2.0, "seed": 5, "max_tokens": 4, "ignore_eos": True}
    params = SamplingParams(n=5, logprobs=0, **fields)
    [every] = llm.generate(PROMPTS[0], params)
    scores = [each.cumulative_logprob for each in every.outputs]
    ranked = sorted(every.outputs, key=lambda each: -(each.cumulative_logprob or 0.0))
    params = SamplingParams(n=2, best_of=5, **fields)
    [best] = llm.generate(PROMPTS[0], params)
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in ranked[:2]]
    assert [each.index for each in best.outputs] == [0, 1]
    assert best.outputs[0].cumulative_logprob == pytest.approx(max(s for s in scores if s))
    assert best.outputs[0].logprobs is None
    assert best.run.new_tokens == 20


def test_shortcuts_are_those_of_the_first_answer(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(n=2, seed=1, max_tokens=3))
    first = output.outputs[0]
    assert (output.text, output.token_ids) == (first.text, first.token_ids)
    assert (output.finish_reason, output.finished) == (first.finish_reason, True)
    assert output.num_cached_tokens == 0
    [later] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    assert int(later.request_id) == int(output.request_id) + 1


def test_the_end_of_the_room_ends_an_answer(loaded: LoadedModel) -> None:
    llm = LLM(loaded, memory=None, store="memory", max_model_len=30)
    ids = list(range(10, 30))
    [output] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=64))
    assert (len(output.token_ids), output.finish_reason) == (10, "length")
    [output] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=None))
    assert len(output.token_ids) == 10
    with pytest.raises(ConfigError, match=r"has 30 tokens and 1 more .* max_model_len is 30"):
        llm.generate([[5] * 30])
    truncated = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=-1)
    [output] = llm.generate([list(range(10, 60))], truncated)
    assert output.prompt_token_ids == list(range(31, 60))
    assert len(output.token_ids) == 1
    truncated.truncate_prompt_tokens = 3
    [output] = llm.generate(PROMPTS[0], truncated)
    tokenizer: Any = loaded.tokenizer
    assert output.prompt_token_ids == tokenizer(PROMPTS[0])["input_ids"][-3:]


def test_prompts_that_pass_the_positions_together_run_apart(loaded: LoadedModel) -> None:
    """Padding would push the row of a short prompt with a long answer beyond the model's end."""
    llm = LLM(loaded, memory=None, store="memory", max_model_len=60)
    prompts = [[7] * 50, [8] * 4, [9] * 5]
    params = [SamplingParams(temperature=0, max_tokens=most) for most in (8, 40, 3)]
    told: list[tuple[int, str]] = []
    outputs = llm.generate(prompts, params, on_text=lambda row, piece: told.append((row, piece)))
    assert [len(each.token_ids) for each in outputs] == [8, 40, 3]
    assert outputs[0].run is not outputs[1].run
    assert outputs[1].run is outputs[2].run
    for row, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        [alone] = llm.generate([prompt], each)
        assert alone.token_ids == outputs[row].token_ids
        assert "".join(piece for number, piece in told if number == row) == outputs[row].text


def test_prompt_logprobs_of_what_is_stored_are_refused(loaded: LoadedModel, llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    batch = llm.batch_of([[5, 6, 7, 8]], params)
    with TieredCache(loaded.model, store="memory", max_tokens=20) as cache:
        llm.answer(batch, params, cache)
        with pytest.raises(ConfigError, match="prompt_logprobs needs the prompt to be read"):
            llm.answer(llm.batch_of([[5, 6, 7, 8, 9, 10]], params), params, cache)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_tokens_that_the_model_does_not_have(llm: LLM, name: str) -> None:
    given: Any = {name: {900: 1.0} if name == "logit_bias" else [900]}
    with pytest.raises(ConfigError, match=f"{name} has token 900, but the model has"):
        llm.generate(PROMPTS[0], SamplingParams(**given))


def test_words_need_a_tokenizer(loaded: LoadedModel) -> None:
    bare = LLM(loaded.model, memory=None, store="memory")
    for name in ("stop", "bad_words"):
        given: Any = {name: ["a"]}
        with pytest.raises(ConfigError, match=f"{name} needs a tokenizer"):
            bare.generate([[5]], SamplingParams(**given))


def test_settings_that_were_changed_since_are_checked(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    params.max_tokens = 2
    [output] = llm.generate(PROMPTS[0], params)
    assert len(output.token_ids) == 2
    params.top_p = 7.0
    with pytest.raises(ConfigError, match=r"top_p=7.0 must lie in \(0, 1\]"):
        llm.generate(PROMPTS[0], params)
