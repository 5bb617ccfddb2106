"""Sampler: each row's token and numbers are those of a plain reference, whatever else is there."""

import math
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.generation.sampler import Choice, Sampler, SamplingRow
from penstock.generation.sampling import SamplingParams
from tests.generation.plain_sampling import drawn, probabilities_of, scores_of

VOCABULARY = 40
PROMPT = [3, 7, 7, 12]
OUTPUT = [5, 9, 5, 5]
ENDS = frozenset([1, 2])


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def row(output: list[int] | None = None, **fields: Any) -> SamplingRow:
    params = SamplingParams(**fields)
    words = tuple(tuple(map(int, word.split())) for word in params.bad_words or ())
    made = SamplingRow(
        params=params, prompt_token_ids=PROMPT, end_token_ids=ENDS, bad_words=words,
        output_token_ids=list(OUTPUT if output is None else output),
    )  # fmt: skip
    if params.seed is not None:
        made.seed(params.seed, torch.device("cpu"))
    return made


def reference(raw: list[float], params: SamplingParams) -> list[float]:
    words = [list(map(int, word.split())) for word in params.bad_words or ()]
    return scores_of(raw, params, PROMPT, OUTPUT, words=words, ends=ENDS)


SHAPES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    {"logit_bias": {4: 9.0, 5: -100.0}},
    {"allowed_token_ids": [1, 5, 6, 30]},
    {"bad_words": ["5", "9 5 5 11", "9 12"]},
    {"min_tokens": 5},
    {"min_tokens": 4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25,
     "logit_bias": {7: 2.0, 5: 3.5}, "bad_words": ["9", "5 13"], "min_tokens": 6,
     "allowed_token_ids": list(range(30))},
]  # fmt: skip
CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"top_k": 6, "top_p": 0.7, "temperature": 1.3, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_tokens_are_the_references(fields: dict[str, Any], seed: int) -> None:
    given = logits(seed=seed)
    scores = reference(given[0].tolist(), SamplingParams(**fields))
    [choice] = Sampler()(given, [row(temperature=0, **fields)])
    assert choice.token_id == max(range(VOCABULARY), key=scores.__getitem__)
    assert choice.tokens is None


@pytest.mark.parametrize(("cut", "shape"), [*zip(CUTS, cycle([SHAPES[0], SHAPES[-1]]))], ids=str)
def test_draws_follow_the_references_distribution(
    cut: dict[str, Any], shape: dict[str, Any]
) -> None:
    """The draw is the largest quotient of probability and exponential noise: the reference makes
    the same noise, and every token comes as often as it is probable."""
    params = SamplingParams(**cut, **shape)
    given = logits(seed=1)
    wanted = probabilities_of(reference(given[0].tolist(), params), params)
    rows = [row(seed=seed, **cut, **shape) for seed in range(300)]
    told = [each.token_id for each in Sampler()(given.expand(300, -1), rows)]
    for seed, token in enumerate(told[:40]):
        assert token == drawn(wanted, torch.Generator().manual_seed(seed))
    assert set(told) <= {t for t, p in enumerate(wanted) if p > 0}
    for token, share in enumerate(wanted):
        spread = math.sqrt(share * (1 - share) / 300)
        assert abs(told.count(token) / 300 - share) <= 5 * spread + 1 / 300


def test_a_row_is_the_same_beside_any_others() -> None:
    cases = [{**shape, **cut, "seed": 9} for shape in SHAPES for cut in CUTS]
    cases += [{**shape, "temperature": 0} for shape in SHAPES]
    given = logits(len(cases), seed=3)
    together = Sampler()(given, [row(**case) for case in cases])
    alone = [Sampler()(given[i : i + 1], [row(**case)])[0] for i, case in enumerate(cases)]
    assert together == alone


def test_a_seeded_row_goes_on_with_its_own_generator() -> None:
    """Rows may come and go between calls."""
    other, sampler, told = row(seed=1), Sampler(), list[list[int]]()
    for has_other in (False, True):
        mine, tokens = row(seed=4), []
        for step in range(6):
            rows = [mine, other] if has_other and step % 2 else [mine]
            tokens.append(sampler(logits(2, seed=step)[: len(rows)], rows)[0].token_id)
        told.append(tokens)
    assert told[0] == told[1]
    assert len(set(told[0])) > 1


def test_rows_without_a_seed_draw_from_the_samplers_generator() -> None:
    given = logits().expand(8, -1)

    def told(sampler: Sampler) -> list[int]:
        return [choice.token_id for choice in sampler(given, [row() for _ in range(8)])]

    state = torch.get_rng_state()
    made = [Sampler(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    first, again, other = map(told, made)
    assert first == again != other
    assert told(made[0]) != first, "it goes on"
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    of_torch = told(Sampler())
    torch.manual_seed(5)
    assert told(Sampler()) == of_torch


def test_numbers_are_those_of_the_logits_as_they_were() -> None:
    given = logits(seed=2)
    plain = given[0].double().log_softmax(dim=-1)
    order = plain.argsort(descending=True).tolist()
    fields: dict[str, Any] = {"temperature": 0, "allowed_token_ids": [order[7]], "logit_bias": {}}
    for count in (0, 3, 10, -1):
        [choice] = Sampler()(given, [row(logprobs=count, repetition_penalty=2.0, **fields)])
        assert choice.tokens is not None
        token, logprob, rank, top_ids, top_logprobs = choice.tokens
        assert (token, rank) == (order[7], 8)
        assert logprob == pytest.approx(float(plain[token]), abs=1e-5)
        assert top_ids == order[: VOCABULARY if count < 0 else count]
        assert top_logprobs == pytest.approx(plain[top_ids].tolist(), abs=1e-5)


def test_best_of_needs_the_number_of_the_token() -> None:
    [choice] = Sampler()(logits(), [row(n=1, best_of=2)])
    assert choice.tokens is not None
    assert choice.tokens.top_ids == []


def test_functions_of_the_caller_come_first() -> None:
    seen: list[Any] = []

    def of_answer(answer: list[int], scores: Tensor) -> Tensor:
        seen.append(list(answer))
        return scores.index_fill(0, torch.tensor([8]), 50.0)

    def of_both(prompt: list[int], answer: list[int], scores: Tensor) -> Tensor:
        seen.append((list(prompt), list(answer)))
        return -scores

    given = logits()
    before = given.clone()
    [choice] = Sampler()(given, [row(temperature=0, logits_processors=[of_answer])])
    assert choice.token_id == 8
    [choice] = Sampler()(given, [row(temperature=0, logits_processors=[of_answer, of_both])])
    assert choice.token_id == int(given[0].argmin())
    [choice] = Sampler()(given, [row(temperature=0, logits_processors=[of_answer],
                                     logit_bias={8: -100.0})])  # fmt: skip
    assert choice.token_id != 8
    assert seen[:3] == [OUTPUT, OUTPUT, (PROMPT, OUTPUT)]
    assert torch.equal(given, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5], "bad_words": ["5"]},
        {"allowed_token_ids": [1, 2], "min_tokens": 9},
        {"logits_processors": [lambda answer, scores: scores - math.inf]},
    ],
)
def test_settings_that_leave_no_token_are_said(fields: dict[str, Any]) -> None:
    for temperature in (0, 1):
        with pytest.raises(ConfigError, match="no token is left to choose"):
            Sampler()(logits(), [row(temperature=temperature, **fields)])


def test_half_precision_is_widened() -> None:
    given = logits().to(torch.bfloat16)
    [choice] = Sampler()(given, [row(temperature=0, logprobs=1)])
    assert isinstance(choice, Choice)
    assert choice.tokens is not None
    wanted = given.float().log_softmax(dim=-1).max()
    assert choice.tokens.logprob == pytest.approx(float(wanted), abs=1e-6)


def test_a_head_that_is_narrower_than_the_embeddings() -> None:
    made = row(temperature=0, repetition_penalty=2.0)
    made.prompt_token_ids = [VOCABULARY + 3]
    assert 0 <= Sampler()(logits(), [made])[0].token_id < VOCABULARY
