"""Engine: requests that come and go get the tokens that they would get alone, and give all back."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from penstock.core.errors import BudgetError, CacheStateError, PromptError, QueueFullError
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.events import Event, Failed, Finished, Prefill, Queued, Token
from penstock.generation.serving.request import Request
from penstock.generation.serving.steps import Steps
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_chat import tiny_chat_model
from penstock.testing.tiny_models import VOCABULARY, tiny_model

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
            engine.submit(Request(prompt=TEXT * 90, sampling=greedy()))
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


@pytest.mark.parametrize(("family", "policy"), [("qwen3", "kvswap"), ("gemma3", "full")])
def test_tokens_do_not_depend_on_who_else_is_served(family: str, policy: str) -> None:
    rng = random.Random(11)
    memory = "auto" if policy == "kvswap" else None
    llm = LLM(tiny_model(family), policy=policy, memory=memory, store="memory", adapter="none")
    requests = [
        Request(
            prompt=[rng.randrange(3, VOCABULARY) for _ in range(rng.choice((3, 60, 200, 330)))],
            sampling=SamplingParams(
                n=1 + number % 2, temperature=1.5 if number % 2 else rng.choice((0, 1.5)),
                seed=number, max_tokens=rng.randrange(1, 24), ignore_eos=True, logprobs=0,
            ),
        )
        for number in range(8)
    ]  # fmt: skip
    with Engine(llm, memory="600KiB", max_running=4, prefill_chunk_size=64) as engine:
        alone = [engine.submit(each).result() for each in requests]
        assert engine.stats().joint_steps == 0
        handles = [engine.submit(each) for each in requests]
        leaving = [engine.submit(replace(each, priority=-1)) for each in requests[:4]]
        for count, handle in enumerate(leaving):  # at various stages of their lives
            for _ in range(3 * count):
                next(handle, None)
            handle.cancel()
        assert {handle.result().reason for handle in leaving} <= {"abort", "length"}
        for handle, former in zip(handles, alone, strict=True):
            for one, other in zip(handle.result().outputs, former.outputs, strict=True):
                assert one.token_ids == other.token_ids
                assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-4)
        stats = engine.stats()
        assert stats.joint_steps > 5
        assert stats.peak_bytes <= 600 * 1024
        assert (stats.used_bytes, stats.running, stats.waiting) == (0, 0, 0)
        if policy == "kvswap":
            assert stats.units_wanted > 0


def test_others_go_on_talking_while_a_prompt_is_read(engine: Engine) -> None:
    told: list[tuple[str, Event]] = []
    talking = engine.submit(
        Request(prompt=TEXT, sampling=greedy(40)), lambda event: told.append(("talks", event))
    )
    next(event for event in talking if isinstance(event, Token))
    engine.submit(
        Request(prompt=TEXT * 20, sampling=greedy(2)), lambda event: told.append(("reads", event))
    ).result()
    chunks = [
        at for at, (who, event) in enumerate(told) if isinstance(event, Prefill) and who == "reads"
    ]
    assert len(chunks) > 10
    for first, second in pairwise(chunks[1:]):
        assert [who for who, _ in told[first + 1 : second]] == ["talks"]


def test_a_cache_that_fails_is_left_out_of_the_step() -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 60)
    with (
        TieredCache(model, "full", store="memory", max_tokens=64) as one,
        TieredCache(model, "full", store="memory", max_tokens=57) as full,
    ):
        steps = Steps(model)
        for cache in (one, full):
            model(ids[None], **cache_argument(model, cache), use_cache=True)
        found = steps([one, full], [[5], [6]])
        one.crop(-1)
        [alone] = steps([one], [[5]])
        assert isinstance(found[1], CacheStateError)
        assert isinstance(found[0], torch.Tensor)
        assert isinstance(alone, torch.Tensor)
        torch.testing.assert_close(found[0], alone)
        steps.close()
