"""Engine: requests that come and go get the tokens that they would get alone, and give all back."""

import asyncio
from collections.abc import Iterator

import pytest

from penstock.core.errors import BudgetError, CacheStateError, PromptError, QueueFullError
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.events import Event, Failed, Finished, Prefill, Queued, Token
from penstock.generation.serving.request import Request
from penstock.testing.tiny_chat import tiny_chat_model

TEXT = "The future of AI is not what it was. "
CHUNK = 64


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        tiny_chat_model(), memory=None, store="memory", adapter="none", prefill_chunk_size=CHUNK
    )


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    with Engine(llm, memory="64MiB", prefill_chunk_size=CHUNK) as made:
        yield made


def greedy(tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def test_events_tell_the_story_of_a_request(llm: LLM, engine: Engine) -> None:
    told: list[Event] = []
    params = SamplingParams(n=2, seed=5, max_tokens=7, logprobs=1, ignore_eos=True)
    handle = engine.submit(Request(prompt=TEXT * 5, sampling=params), told.append)
    events = list(handle)
    assert events == told
    assert isinstance(events[0], Queued)
    reads = [each for each in events if isinstance(each, Prefill)]
    assert [each.processed for each in reads] == [0, 64, 128, reads[-1].total]
    *_, end = events
    assert isinstance(end, Finished)
    assert end.run is not None
    [alone] = llm.generate(TEXT * 5, params)
    assert [each.token_ids for each in end.outputs] == [each.token_ids for each in alone.outputs]
    for output in end.outputs:
        own = [each for each in events if isinstance(each, Token) and each.index == output.index]
        assert "".join(each.text for each in own) == output.text
        assert [token for each in own for token in each.token_ids] == output.token_ids
        assert [one for each in own for one in each.logprobs or ()] == output.logprobs
        assert [each.finish_reason for each in own] == [None] * 6 + ["length"]
    assert end.usage.new_tokens == 14
    assert engine.stats().used_bytes == 0


def test_events_come_in_an_event_loop_too(engine: Engine) -> None:
    async def read() -> list[Event]:
        return [event async for event in engine.submit(Request(prompt=TEXT, sampling=greedy(3)))]

    kinds = [type(event).__name__ for event in asyncio.run(read())]
    assert kinds == ["Queued", "Prefill", "Prefill", "Token", "Token", "Token", "Finished"]


def test_what_can_never_run_is_refused_and_what_fails_fails_alone(llm: LLM) -> None:
    def wrong(ids: list[int], logits: object) -> None:
        raise ZeroDivisionError("the grammar")

    with Engine(llm, memory="1MiB", max_waiting=0, max_running=1) as engine:
        with pytest.raises(PromptError, match="zero tokens"):
            engine.submit(Request(prompt=[]))
        with pytest.raises(BudgetError, match="the request needs"):
            engine.submit(Request(prompt=TEXT * 90, sampling=greedy())).result()
        bad = SamplingParams(logits_processors=[wrong])  # type: ignore[list-item]
        handle = engine.submit(Request(prompt=TEXT, sampling=bad))
        with pytest.raises(ZeroDivisionError):
            handle.result()
        assert isinstance([*handle][-1], Failed)
        long = engine.submit(Request(prompt=TEXT, sampling=greedy(300)))
        next(event for event in long if isinstance(event, Token))
        with pytest.raises(QueueFullError, match="wait already") as refused:
            engine.submit(Request(prompt=TEXT))
        assert refused.value.retry_after_s >= 1
        long.cancel()
        assert long.result().reason == "abort"
        assert engine.stats().used_bytes == 0
        assert engine.submit(Request(prompt=TEXT, sampling=greedy(2))).result().reason == "length"
    with pytest.raises(CacheStateError, match="closed"):
        engine.submit(Request(prompt=TEXT))
