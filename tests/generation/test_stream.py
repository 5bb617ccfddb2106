"""LLM.stream: what is new as it comes, an end at any time, and errors where they are met."""

import _thread
import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.errors import ConfigError, PromptError
from penstock.generation.engine import LLM
from penstock.generation.output import StreamedOutput
from penstock.generation.sampler import Sampler
from penstock.generation.sampling import SamplingParams
from penstock.testing.tiny_chat import tiny_chat_model

PROMPTS = ["The future of AI", "To be"]
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_chat_model(positions=1 << 14), memory=None, store="memory")


def is_free(llm: LLM) -> bool:
    """Whether no cache is open on the model, and no run is under way."""
    threads = [each for each in threading.enumerate() if each.name == "penstock-stream"]
    return not threads and llm.model.config._attn_implementation != "penstock"


def test_pieces_join_to_the_answers(llm: LLM) -> None:
    params = [
        SamplingParams(
            n=2,
            temperature=1.3,
            seed=3,
            max_tokens=9,
            logprobs=1,
            prompt_logprobs=0,
            ignore_eos=True,
        ),
        SamplingParams(temperature=0, max_tokens=5, stop="nothing"),
    ]
    told: dict[tuple[int, int], list[StreamedOutput]] = {}
    with llm.stream(PROMPTS, params) as stream:
        early = stream.outputs
        assert early is None
        for news in stream:
            told.setdefault((news.prompt_index, news.outputs[0].index), []).append(news)
    assert sorted(told) == [(0, 0), (0, 1), (1, 0)]
    assert stream.outputs is not None
    for (prompt, index), every in told.items():
        request, answer = stream.outputs[prompt], stream.outputs[prompt].outputs[index]
        assert {each.request_id for each in every} == {request.request_id}
        assert every[0].prompt == PROMPTS[prompt]
        assert every[0].prompt_logprobs == request.prompt_logprobs
        assert {each.prompt_logprobs is None for each in every[1:]} == {True}
        assert "".join(each.text for each in every) == answer.text
        assert [token for each in every for token in each.token_ids] == answer.token_ids
        if prompt == 0:
            logprobs = [one for each in every for one in each.outputs[0].logprobs or ()]
            assert logprobs == answer.logprobs
        assert every[-1].finish_reason == answer.finish_reason is not None
        assert {each.finish_reason for each in every[:-1]} == {None}
        assert every[-1].outputs[0].cumulative_logprob == answer.cumulative_logprob
    assert told[0, 1][-1].finished
    assert not told[0, 0][-2].finished
    assert is_free(llm)
    whole = llm.generate(PROMPTS, params)
    assert [[a.token_ids for a in each.outputs] for each in whole] == [
        [a.token_ids for a in each.outputs] for each in stream.outputs
    ]


def test_news_come_before_the_answer_is_done(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    first = next(stream)
    assert len(first.token_ids) == 1
    assert not first.finished
    assert stream.outputs is None
    stream.close()


@pytest.mark.parametrize("how", ["close", "with", "break", "del"])
def test_a_stream_that_is_left_early_ends_its_run(llm: LLM, how: str) -> None:
    if how == "break":
        for _ in llm.stream(PROMPTS[0], LONG):
            break
    else:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        if how == "close":
            stream.close()
            stream.close()
            assert list(stream) == []
            assert stream.outputs is None
        elif how == "with":
            with stream:
                next(stream)
        del stream
    gc.collect()
    assert is_free(llm)
    [again] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2))
    assert len(again.token_ids) == 2


def test_a_run_ends_between_chunks_too() -> None:
    llm = LLM(tiny_chat_model(positions=1 << 14), memory=None, store="memory", prefill_chunk_size=2)
    reading = threading.Event()
    seen: list[int] = []

    def on_progress(done: int, total: int) -> None:
        seen.append(done)
        reading.set()

    stream = llm.stream([[5] * 9000], LONG, on_progress=on_progress)
    assert reading.wait(60)
    stream.close()
    assert is_free(llm)
    assert seen[-1] < 9000


def test_an_error_comes_up_where_it_is_met(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    choose: Callable[..., Any] = Sampler.__call__

    def fails(self: Sampler, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the third step fails")
        return choose(self, *args)

    monkeypatch.setattr(Sampler, "__call__", fails)
    stream = llm.stream(PROMPTS[0], LONG)
    assert [len(next(stream).token_ids) for _ in range(2)] == [1, 1]
    with pytest.raises(RuntimeError, match="the third step fails"):
        next(stream)
    assert list(stream) == []
    assert is_free(llm)


def test_an_interrupt_ends_the_run(llm: LLM) -> None:
    def interrupt(done: int, total: int) -> None:
        _thread.interrupt_main()
        time.sleep(0.5)

    # A shell's background job is started with SIGINT ignored.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            llm.stream(PROMPTS[0], LONG, on_progress=interrupt) as stream,
        ):
            for _ in stream:
                pass
    finally:
        signal.signal(signal.SIGINT, former)
    assert is_free(llm)


def test_refusals_come_at_once(llm: LLM) -> None:
    with pytest.raises(PromptError, match="zero tokens"):
        llm.stream([[]])
    with pytest.raises(ConfigError, match="best_of cannot be streamed"):
        llm.stream(PROMPTS, [LONG, SamplingParams(best_of=2)])
    with pytest.raises(ConfigError, match="stream has no lora_request: give LLM a model object"):
        llm.stream(PROMPTS, lora_request=1)
    with pytest.raises(ConfigError, match="stream has no tokens"):
        llm.stream(PROMPTS, tokens=1)
    assert is_free(llm)
