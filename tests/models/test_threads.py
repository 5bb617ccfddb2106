"""Several caches of one model in several threads, and plain forward passes beside them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams, TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import tiny_model

MOST = 70
POLICIES: list[dict[str, Any]] = [
    {"policy": "kvswap", "must_tier": True},
    {"policy": "quest", "must_tier": True},
    {"policy": "full"},
    {"policy": "kvswap", "exact": True},
    {"policy": "flexgen"},
    {"policy": "dynakv", "must_tier": True},
]
THREADS = 6


def prompt(number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(3, 160, (1, 20 + number % 30), generator=draw)


def with_cache(model: Any, number: int) -> list[int]:
    chosen = POLICIES[number % len(POLICIES)]
    with TieredCache(model, store="memory", max_tokens=MOST, **chosen) as cache:
        return generate(model, number, **cache_argument(model, cache))


def generate(model: Any, number: int, **others: Any) -> list[int]:
    ids = prompt(number)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
        pad_token_id=0, eos_token_id=None, **others,
    )  # fmt: skip
    tokens: list[int] = out[0].tolist()
    return tokens


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of jobs that run at the same time, each in a thread of its own."""
    begin = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        begin.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return [each.result() for each in [threads.submit(run, job) for job in jobs]]


@pytest.mark.parametrize(("family", "calls"), [("llama", 6), ("gemma2", 4)])
def test_caches_open_and_close_under_running_forwards(family: str, calls: int) -> None:
    """Each thread makes half of the calls, from another one on."""
    model = tiny_model(family)
    before = model.config._attn_implementation
    numbers = range(calls)
    tiered = [with_cache(model, number) for number in numbers]
    plain = [generate(model, number) for number in numbers]
    assert tiered[2] == plain[2]  # of the policy full

    def many(job: Callable[[Any, int], list[int]], first: int) -> list[list[int]]:
        return [job(model, (first + i) % calls) for i in numbers[: calls // 2]]

    def checked(job: Callable[[Any, int], list[int]], right: list[list[int]], first: int) -> bool:
        return many(job, first) == [right[(first + i) % calls] for i in numbers[: calls // 2]]

    jobs: list[Callable[[], Any]] = []
    jobs += [partial(checked, with_cache, tiered, 5 * i) for i in range(THREADS - 2)]
    jobs += [partial(checked, generate, plain, calls // 2 * i) for i in range(2)]
    assert together(jobs) == [True] * THREADS
    assert model.config._attn_implementation == before
    assert not any("penstock" in name for name in model.__dict__)
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_cache_opens_or_closes_within_a_forward(family: str, own: str) -> None:
    """The mask was made for one attention function, and another one takes it."""
    model = tiny_model(family)
    if own == "eager" or model._supports_sdpa:
        model.set_attn_implementation(own)
    ids = prompt(17)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    right = model(ids, attention_mask=mask).logits[:, 5:]
    opened: list[TieredCache] = []

    def change(*_: Any) -> None:
        hook.remove()  # a cache that opens looks at a forward pass of its own
        if opened:
            opened.pop().close()
        else:
            opened.append(TieredCache(model, store="memory", max_tokens=MOST, must_tier=True))

    for count in (1, 0):
        hook = model.model.layers[0].register_forward_pre_hook(change)
        found = model(ids, attention_mask=mask).logits[:, 5:]
        assert len(opened) == count
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_seeds_belong_to_their_call() -> None:
    llm = LLM(tiny_model("llama"), policy="full", memory=None)
    state = torch.random.get_rng_state()

    def draw(seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, max_tokens=5, seed=seed)
        return [llm.generate([prompt(9)[0].tolist()], params)[0].token_ids for _ in range(2)]

    alone = [draw(seed) for seed in range(4)]
    assert len({str(each) for each in alone}) == 4
    assert together([partial(draw, seed) for seed in range(4)]) == alone
    assert torch.equal(torch.random.get_rng_state(), state)
