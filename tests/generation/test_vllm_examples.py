"""vLLM's offline examples, as they are documented, with the import alone different.

Models are a folder of a random one; what is printed is checked against the plain model.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.testing.tiny_chat import tiny_chat_model

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_chat_model(folder=folder)
    return str(folder)


def plain(llm: LLM, text: str, new_tokens: int) -> str:
    """What transformers' own generate says, greedily."""
    tokenizer, model = llm.get_tokenizer(), llm.model
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )  # fmt: skip
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    return iter(capsys.readouterr().out.splitlines())


def test_basic(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    # basic.py
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=model, tensor_parallel_size=1)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

    told = list(lines(capsys))
    assert [line.partition(", Generated")[0] for line in told] == [
        f"Prompt: {p!r}" for p in PROMPTS
    ]
    assert all(1 <= len(output.outputs[0].token_ids) <= 16 for output in outputs)


def test_generate_with_changed_defaults(model: str) -> None:
    # basic/generate.py
    args: dict[str, Any] = {"model": model, "dtype": "auto", "max_model_len": 256}
    max_tokens, temperature, top_p, top_k = 12, 0.0, 0.9, 4
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = max_tokens
    sampling_params.temperature = temperature
    sampling_params.top_p = top_p
    sampling_params.top_k = top_k
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        assert output.prompt is not None
        assert output.outputs[0].text == plain(llm, output.prompt, 12)


def test_the_models_own_sampling(model: str) -> None:
    # basic_with_model_default_sampling.py
    llm = LLM(model=model)
    llm.model.generation_config.update(temperature=0.0, max_new_tokens=7, repetition_penalty=1.2)
    sampling_params = llm.get_default_sampling_params()
    wanted = SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.2)
    assert sampling_params == wanted
    by_default = llm.generate(PROMPTS)
    asked = llm.generate(PROMPTS, wanted)
    assert [each.outputs[0].text for each in by_default] == [each.outputs[0].text for each in asked]
    assert (
        LLM(llm.model, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    )


def test_chat(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    # basic/chat.py
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0)
    llm = LLM(model=model)

    def print_outputs(outputs: Any) -> None:
        for output in outputs:
            prompt = output.prompt
            generated_text = output.outputs[0].text
            print(f"Prompt: {prompt!r}")
            print(f"Generated text: {generated_text!r}")
        print("-" * 80)

    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(outputs)
    conversations = [conversation for _ in range(3)]
    several = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(several)

    told = [line for line in lines(capsys) if line.startswith("Generated")]
    assert len(told) == 4
    assert len(set(told)) == 1
    assert outputs[0].prompt is not None
    assert "assistant\nHello! How can I assist" in outputs[0].prompt
    assert outputs[0].outputs[0].text == plain_of_ids(llm, outputs[0].prompt_token_ids, 8)


def plain_of_ids(llm: LLM, ids: list[int], new_tokens: int) -> str:
    tokenizer = llm.get_tokenizer()
    output = llm.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=new_tokens,
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


def test_requests_with_settings_of_their_own(model: str) -> None:
    # llm_engine_example.py: create_test_prompts(), through LLM.generate's list of settings
    test_prompts = [
        (
            "A robot may not injure a human being",
            SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
        ),
        (
            "To be or not to be,",
            SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2),
        ),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        ),
    ]
    llm = LLM(model=model)
    outputs = llm.generate([p for p, _ in test_prompts], [params for _, params in test_prompts])
    for request_output, (prompt, params) in zip(outputs, test_prompts, strict=True):
        assert request_output.finished
        assert request_output.prompt == prompt
        assert len(request_output.outputs) == params.n
    first = outputs[0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    logprobs = first.outputs[0].logprobs
    assert logprobs is not None
    for token_id, position in zip(first.outputs[0].token_ids, logprobs, strict=True):
        assert position[token_id].rank == 1
        assert position[token_id].logprob <= 0
    total = sum(
        position[token].logprob for token, position in zip(first.token_ids, logprobs, strict=True)
    )
    assert first.outputs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_token_ids(model: str) -> None:
    # the documented forms of a prompt
    llm = LLM(model=model)
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=6)
    token_ids = tokenizer.encode(PROMPTS[0])
    texts = llm.generate({"prompt": PROMPTS[0]}, params)
    ids = llm.generate({"prompt_token_ids": token_ids}, params)
    several = llm.generate(
        [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in PROMPTS], params
    )
    tokenizer.pad_token = tokenizer.eos_token
    encoded = llm.generate(tokenizer(PROMPTS, padding=True, return_tensors="pt"), params)
    assert texts[0].prompt_token_ids == ids[0].prompt_token_ids == token_ids
    assert texts[0].outputs[0].text == ids[0].outputs[0].text == several[0].outputs[0].text
    assert [each.text for each in encoded] == [each.text for each in several]
    assert ids[0].prompt is None


def test_seeds(model: str) -> None:
    llm = LLM(model=model)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=8) for seed in (42, 42, 43)]
    first, again, other = llm.generate([PROMPTS[0]] * 3, params)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids

    def of_engine(seed: int) -> list[list[int]]:
        seeded = LLM(model=model, seed=seed)
        return [each.token_ids for each in seeded.generate(PROMPTS, SamplingParams(max_tokens=6))]

    assert of_engine(0) == of_engine(0) != of_engine(1)


def test_stop(model: str) -> None:
    llm = LLM(model=model)
    characters = list(range(3, len(llm.get_tokenizer())))
    common: dict[str, Any] = {
        "temperature": 0, "max_tokens": 12, "allowed_token_ids": characters
    }  # fmt: skip
    [whole] = llm.generate(PROMPTS[2], SamplingParams(**common))
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    assert len(text) == 12
    stop = text[4:6]
    at = text.index(stop)
    [output] = llm.generate(PROMPTS[2], SamplingParams(stop=["nothing", stop], **common))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text[:at], stop)
    [output] = llm.generate(
        PROMPTS[2], SamplingParams(stop=stop, include_stop_str_in_output=True, **common)
    )
    assert output.outputs[0].text == text[: at + 2]
    [output] = llm.generate(PROMPTS[2], SamplingParams(stop_token_ids=[ids[5]], **common))
    end = ids.index(ids[5])
    assert output.outputs[0].token_ids == ids[: end + 1]
    assert output.outputs[0].text == text[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", ids[5])
    word = next(each for each in text if not each.isspace())
    [output] = llm.generate(PROMPTS[2], SamplingParams(bad_words=[word], **common))
    assert word not in output.outputs[0].text


def test_streaming(model: str) -> None:
    # async_llm_streaming.py with RequestOutputKind.DELTA; the loop is a plain one here
    llm = LLM(model=model, enforce_eager=True)
    sampling_params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=42)
    told = ""
    for output in llm.stream("The future of artificial intelligence is", sampling_params):
        for completion in output.outputs:
            new_text = completion.text
            if new_text:
                told += new_text
        if output.finished:
            break
    [whole] = llm.generate("The future of artificial intelligence is", sampling_params)
    assert told == whole.outputs[0].text
