"""Eq. 1-5 give Fig. 7 of the paper, under named conventions, and behave as they must."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.shape import KVShape
from penstock.search.transfer_model import (
    CONVENTIONS,
    Convention,
    TransferRequest,
    step_by_step,
    token_by_token,
)

GIB = 2**30
OPT = KVShape(num_layers=32, num_query_heads=32, num_kv_heads=32, head_dim=128, dtype=torch.float16)


def figure_7(step_tokens: int = 32) -> TransferRequest:
    return TransferRequest.of_shape(
        OPT,
        beams=64,
        step_tokens=step_tokens,
        prompt_tokens=128,
        new_tokens=1920,
        memory_bytes=7 * GIB,
    )


def small(**changes: Any) -> TransferRequest:
    request = TransferRequest(
        num_layers=4,
        token_bytes=8,
        beams=6,
        step_tokens=5,
        prompt_tokens=7,
        new_tokens=23,
        memory_bytes=1200,
    )
    return replace(request, **changes)


REQUESTS = st.builds(
    TransferRequest,
    num_layers=st.integers(1, 6),
    token_bytes=st.integers(1, 64),
    beams=st.integers(1, 20).map(lambda pairs: 2 * pairs),
    step_tokens=st.integers(1, 40),
    prompt_tokens=st.integers(1, 50),
    new_tokens=st.integers(1, 60),
    memory_bytes=st.integers(6 * 64 * 110, 1_000_000),
)


def test_figure_7_token_by_token() -> None:
    request = figure_7()
    assert request.token_bytes == 16 << 10
    assert token_by_token(request).total_bytes // GIB == 53_012


@pytest.mark.parametrize(
    ("convention", "figures"),
    [
        ("paper-figure", (2052, 1044, 540)),
        ("literal", (2010, 990, 480)),
        ("start", (1995, 986, 480)),
    ],
)
def test_figure_7_by_step(convention: Convention, figures: tuple[int, ...]) -> None:
    totals = [step_by_step(figure_7(n), convention).total_bytes for n in (32, 64, 128)]
    assert totals == [figure * GIB for figure in figures]


def test_the_convention_start_gives_the_shares_that_the_paper_measured() -> None:
    baseline = token_by_token(figure_7()).total_bytes
    shares = [step_by_step(figure_7(n)).total_bytes / baseline for n in (32, 64, 128)]
    assert [int(1000 * share) / 10 for share in shares] == [3.7, 1.8, 0.9]  # Fig. 10a


def test_token_by_token_is_the_equations() -> None:
    request = small()
    made = token_by_token(request)
    total = 0
    for i in range(request.new_tokens):
        kv_layer = request.beams * request.token_bytes * (i + request.prompt_tokens)
        in_gpu = min(request.num_layers, request.memory_bytes // kv_layer)
        assert made.loaded_bytes[i] == (request.num_layers - in_gpu) * kv_layer
        total += int(made.loaded_bytes[i])
    assert made.total_bytes == total > 0
    assert made.starts.tolist() == list(range(7, 30))


def test_a_series_by_token_adds_up_to_one_by_step() -> None:
    request = small()
    tokens = token_by_token(request)
    steps = tokens.add_up(request.step_tokens)
    assert steps.starts.tolist() == step_by_step(request).starts.tolist() == [7, 12, 17, 22, 27]
    assert steps.total_bytes == tokens.total_bytes
    assert steps.loaded_bytes[1] == tokens.loaded_bytes[5:10].sum()


def test_a_shorter_last_step() -> None:
    request, beam = small(), 32
    assert step_by_step(request, "literal").loaded_bytes.tolist() == [
        6 * beam * length for length in (7, 12, 17, 22)
    ]
    # 1200 bytes hold 6 beams of 6 tokens: nothing ever fits.
    assert step_by_step(request, "start").loaded_bytes.tolist() == [
        6 * beam * length for length in (7, 12, 17, 22, 27)
    ]
    ends = step_by_step(request, "paper-figure")
    assert ends.loaded_bytes.tolist() == [6 * beam * length for length in (12, 17, 22, 27, 30)]
    assert ends.groups.tolist() == [2, 3, 6, 6, 6]


def test_nothing_moves_while_everything_fits() -> None:
    request = small(memory_bytes=6 * 32 * 17)
    for convention in ("start", "paper-figure"):
        made = step_by_step(request, convention)
        assert made.loaded_bytes[:2].tolist() == [0, 0]
        assert made.loaded_bytes[2:].min() > 0
        assert made.groups.tolist() == [1, 1, 2, 2, 2]
    assert token_by_token(small(memory_bytes=6 * 32 * 30)).total_bytes == 0


@given(REQUESTS)
def test_more_memory_never_costs(request: TransferRequest) -> None:
    more = replace(request, memory_bytes=2 * request.memory_bytes)
    assert token_by_token(more).total_bytes <= token_by_token(request).total_bytes
    for convention in CONVENTIONS:
        before = step_by_step(request, convention).total_bytes
        assert step_by_step(more, convention).total_bytes <= before


@given(REQUESTS)
def test_more_beams_never_save(request: TransferRequest) -> None:
    more = replace(request, beams=request.beams + 2)
    assert token_by_token(more).total_bytes >= token_by_token(request).total_bytes
    for convention in CONVENTIONS:
        before = step_by_step(request, convention).total_bytes
        assert step_by_step(more, convention).total_bytes >= before


@given(REQUESTS)
def test_longer_steps_load_less_where_nothing_fits(request: TransferRequest) -> None:
    one = request.beam_token_bytes * (request.prompt_tokens + 60)
    request = replace(request, memory_bytes=one, new_tokens=60, beams=40)
    totals = [step_by_step(replace(request, step_tokens=n)).total_bytes for n in (1, 5, 10, 30, 60)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


@given(REQUESTS)
def test_conventions_are_in_order(request: TransferRequest) -> None:
    start = step_by_step(request, "start")
    ends = step_by_step(request, "paper-figure")
    assert (start.loaded_bytes <= ends.loaded_bytes).all()
    assert np.array_equal(start.loaded_bytes == 0, start.groups == 1)


def test_memory_for_less_than_one_beam() -> None:
    needed = 30 * 32
    assert step_by_step(small(memory_bytes=needed)).groups[-1] == 6
    with pytest.raises(BudgetError, match="does not hold one beam of 30 tokens") as caught:
        step_by_step(small(memory_bytes=needed - 1))
    assert caught.value.needed_bytes == needed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": 0}, "beams=0"),
        ({"step_tokens": 0}, "step_tokens=0"),
        ({"prompt_tokens": -1}, "prompt_tokens=-1"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"width": 4}, "not a multiple of width=4"),
    ],
)
def test_impossible_requests(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def test_an_unknown_convention() -> None:
    with pytest.raises(ConfigError, match="paper-figure"):
        step_by_step(small(), "end")  # type: ignore[arg-type]


def test_a_step_longer_than_the_answer() -> None:
    request = small(step_tokens=1000)
    assert step_by_step(request, "start").starts.tolist() == [7]
    assert step_by_step(request, "literal").total_bytes == 0
