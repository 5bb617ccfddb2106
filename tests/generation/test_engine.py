"""LLM gives the tokens of `model.generate`, streams them, and leaves the model as it was."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.core.errors import BudgetError, ConfigError, PromptError
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.methods import POLICIES
from penstock.methods.dynakv.policy import DynaKV
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [[5 + i % 90 for i in range(150)], [7 + i % 50 for i in range(37)]]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def recall() -> LLM:
    return LLM("recall", memory=None, store="memory")


def plain(model: Any, ids: list[int], new_tokens: int = 8) -> list[int]:
    inputs = torch.tensor([ids])
    mask = torch.ones_like(inputs)
    output = model.generate(inputs, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return list(output[0, len(ids) :].tolist())


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "full", "memory": None},
        {"policy": "kvswap", "memory": None},
        {"policy": "kvswap", "memory": "3/4", "exact": True},
        {"policy": "flexgen", "memory": "400KiB", "prefill_chunk_size": 41},
    ],
    ids=str,
)
def test_a_batch_gives_each_prompts_own_tokens(model: Any, settings: dict[str, Any]) -> None:
    outputs = LLM(model, store="memory", **settings).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == plain(model, prompt)
        assert output.prompt_token_ids == prompt
        assert output.prompt_tokens == len(prompt)
        assert output.finish_reason == "length"
        assert output.prompt is None
        assert output.text == ""


@pytest.mark.parametrize("named", [-1, 128, None])
def test_a_padding_token_that_the_model_does_not_have(
    model: Any, named: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "pad_token_id", named)
    outputs = LLM(model, policy="full", memory=None, store="memory").generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in outputs] == [plain(model, prompt) for prompt in PROMPTS]


def test_the_report_counts(model: Any) -> None:
    [first, second] = LLM(model, store="memory", memory=None).generate(PROMPTS, GREEDY)
    assert first.run is second.run
    run = first.run
    assert (run.prompt_tokens, run.new_tokens, run.decode_tokens) == (187, 16, 14)
    assert run.prefill_s > 0
    assert run.decode_s > 0
    assert run.memory.peak_bytes <= run.memory.limit_bytes
    assert run.stats.decode.steps == 7


def test_progress_ends_at_the_padded_length(model: Any) -> None:
    seen: list[tuple[int, int]] = []
    llm = LLM(model, store="memory", memory=None, prefill_chunk_size=64)
    llm.generate(PROMPTS, GREEDY, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 150), (128, 150), (150, 150)]


@pytest.mark.parametrize("policy", ["dynakv", "pqcache", "kvswap"])
def test_the_index_of_a_prompt_is_made_before_the_first_token(model: Any, policy: str) -> None:
    seen: list[tuple[int, float]] = []
    done = 0

    def on_progress(tokens: int, total: int) -> None:
        nonlocal done
        done = tokens

    llm = LLM(model, store="memory", memory=None, prefill_chunk_size=64,
              policy=POLICIES[policy](selected_tokens=40))  # type: ignore[call-arg]  # fmt: skip
    [output, _] = llm.generate(
        PROMPTS, GREEDY, on_progress=on_progress,
        on_index=lambda share: seen.append((done, share)),
    )  # fmt: skip
    shares = [share for _, share in seen]
    assert {tokens for tokens, _ in seen} == {150}, "behind the last chunk"
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(shares) >= (2 * 4 if policy == "dynakv" else 4), "row by row"
    stats = output.run.stats
    assert 0 < stats.prefill.index_s < output.run.prefill_s
    assert stats.decode.index_s == 0


def test_an_index_of_a_prompt_of_unknown_length_is_made_in_the_first_step(model: Any) -> None:
    shares: list[float] = []
    answers = []
    for known in (150, None):
        shares.clear()
        with TieredCache(
            model, policy=DynaKV(selected_tokens=40), store="memory", max_tokens=200,
            prompt_tokens=known, index_progress=shares.append,
        ) as cache:  # fmt: skip
            output = model.generate(
                torch.tensor([PROMPTS[0]]), **cache_argument(model, cache), max_new_tokens=8,
                do_sample=False,
            )  # fmt: skip
            answers.append(output[0].tolist())
            phases = cache.stats.prefill, cache.stats.decode
            made = [phase.index_s > 0 for phase in phases]
            assert made == ([True, False] if known else [False, True])
            assert shares[-1] == 1.0
    assert answers[0] == answers[1]


def test_the_end_token_ends_a_row_and_is_kept(model: Any) -> None:
    token = plain(model, PROMPTS[0])[2]
    model.generation_config.eos_token_id = token
    try:
        [output] = LLM(model, store="memory", memory=None).generate(PROMPTS[0], GREEDY)
    finally:
        model.generation_config.eos_token_id = None
    assert output.token_ids == plain(model, PROMPTS[0])[: len(output.token_ids)]
    assert output.token_ids[-1] == token
    assert output.finish_reason == "stop"


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model: Any) -> None:
    llm = LLM(model, store="memory", memory=None)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=seed))[0].token_ids
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.rand(3), expected)


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = model.config._attn_implementation
    config = model.generation_config.to_dict()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    llm = LLM(model, store="memory", memory=None)
    llm.generate(PROMPTS, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, on_progress=interrupt)
    assert model.config._attn_implementation == before
    assert model.generation_config.to_dict() == config
    assert llm.generate(PROMPTS[1], GREEDY)[0].token_ids == plain(model, PROMPTS[1])


def test_text_is_streamed_and_stopped(recall: LLM) -> None:
    llm = recall
    pieces: list[str] = []
    prompt = "The grass is green . The sky is blue . The sun is yellow . " * 3
    [whole] = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=9), on_text=lambda _, t: pieces.append(t)
    )
    assert "".join(pieces) == whole.text
    assert len(pieces) > 3
    assert whole.prompt == prompt
    word = whole.text.split()[4]
    [stopped] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=9, stop=word))
    assert stopped.text == whole.text[: whole.text.index(word)]
    assert stopped.finish_reason == "stop"


def test_refusals(model: Any) -> None:
    llm = LLM(model, store="memory", memory=None)
    with pytest.raises(PromptError, match=r"512 tokens and 1 more .* 512 positions"):
        llm.generate([[5] * 512], SamplingParams())
    with pytest.raises(PromptError, match="zero tokens"):
        llm.generate([[5], []])
    with pytest.raises(PromptError, match="without a tokenizer"):
        llm.generate("text")
    with pytest.raises(ConfigError, match="stop needs a tokenizer"):
        llm.generate([5], SamplingParams(stop="a"))
    with pytest.raises(ConfigError, match="there are 2 prompts and 3 sampling_params"):
        llm.generate([[5], [6]], [GREEDY] * 3)
    settings: Any = {"temperature": 0}
    for given in (settings, [settings]):
        with pytest.raises(ConfigError, match="sampling_params is a dict; give SamplingParams"):
            llm.generate([[5]], given)
    with pytest.raises(ConfigError, match="prefill_chunk_size=0"):
        LLM(model, prefill_chunk_size=0)
    with pytest.raises(BudgetError) as caught:
        LLM(model, store="memory", memory=1000).generate([[5] * 400], GREEDY)
    needed = caught.value.needed_bytes
    assert needed is not None
    LLM(model, store="memory", memory=needed).generate([[5] * 400], GREEDY)


@pytest.mark.parametrize("name", ["cache_implementation", "both"])
def test_what_a_models_own_config_says_of_caches_is_ours(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [plain(model, prompt) for prompt in PROMPTS]
    monkeypatch.setattr(model.generation_config, "cache_implementation", "static")
    if name == "both":  # without a tokenizer nobody knows the text of an answer
        monkeypatch.setattr(model.generation_config, "stop_strings", ["x"])
    outputs = LLM(model, store="memory").generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert model.generation_config.cache_implementation == "static"


def test_a_models_own_look_ahead_loses_no_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "prompt_lookup_num_tokens", 3)
    outputs = LLM(model, store="memory").generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert [output.token_ids for output in outputs] == [plain(model, each) for each in PROMPTS]


def test_of_a_models_own_generation_config_only_what_ends_an_answer_counts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM: settings that are given are all settings."""
    expected = [plain(model, prompt) for prompt in PROMPTS]
    own: dict[str, Any] = {
        "repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "min_new_tokens": 9, "max_time": 0.0,
        "suppress_tokens": sorted(set(expected[0])), "forced_eos_token_id": 5, "do_sample": True,
        "temperature": 0.3, "top_k": 2, "bad_words_ids": [[each] for each in set(expected[1])],
    }  # fmt: skip
    for name, value in own.items():
        monkeypatch.setattr(model.generation_config, name, value)
    outputs = LLM(model, store="memory", memory=None).generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert [each.token_ids for each in outputs] == expected


@pytest.mark.parametrize("fields", [{"temperature": 2}, {"top_k": np.int64(5)}], ids=str)
def test_numbers_that_transformers_would_refuse(model: Any, fields: dict[str, Any]) -> None:
    [output] = LLM(model, store="memory").generate([5, 6], SamplingParams(max_tokens=3, **fields))
    assert len(output.token_ids) == 3


def test_a_models_own_stop_strings_end_an_answer(
    recall: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, text = recall, "The grass is green . The sky is blue . " * 5
    [whole] = llm.generate(text, GREEDY)
    assert "sky" in whole.text
    own: str | list[str]
    for own in ("sky", ["nothing", "sky"]):
        monkeypatch.setattr(llm.model.generation_config, "stop_strings", own)
        [stopped] = llm.generate(text, GREEDY)
        assert (stopped.text, stopped.finish_reason) == (whole.text.partition("sky")[0], "stop")
    [earlier] = llm.generate(text, replace(GREEDY, stop="grass"))
    assert "grass" not in earlier.text
