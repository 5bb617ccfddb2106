"""SamplingParams refuses what cannot be meant."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.generation.sampling import SamplingParams
from penstock.search.search_params import SearchParams


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e-40}, r"temperature=1e-40 .* from 1e-06 on"),
        ({"seed": 1 << 64}, f"seed={1 << 64}"),
        ({"seed": -(1 << 63) - 1}, "seed=-"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": ("ok", "")}, "empty string"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"temperature": "0"}, "temperature='0' must be a number"),
        ({"top_p": None}, "top_p=None"),
        ({"stop": 5}, "stop=5"),
        ({"stop": iter(["a"])}, "stop=<list_iterator .* a list of texts"),  # read but once
        ({"temperature": 10**400}, "temperature is too large"),
        ({"stop": ["a", 1]}, r"stop=\['a', 1\] must be a text, or a list of texts"),
    ],
)
def test_a_field_of_another_kind_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**fields)
    if "max_tokens" not in fields:
        with pytest.raises(ConfigError, match=named):
            SearchParams(**fields)
    with pytest.raises(ConfigError, match=r"beams=2\.0 must be a whole number"):
        SearchParams(beams=2.0)  # type: ignore[arg-type]


def test_numbers_of_numpy_will_do() -> None:
    given: Any = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "stop": ["a"]}
    given |= {"seed": np.int64(5), "top_k": np.int64(2), "top_p": 1}
    made = SamplingParams(**given)
    assert made.max_tokens == 3
    kinds = [type(getattr(made, name)) for name in ("max_tokens", "seed", "top_k")]
    assert kinds == [int, int, int]
    assert (type(made.temperature), type(made.top_p)) == (float, float)
    search = SearchParams(beams=np.int64(4), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(search.beams), type(search.temperature)) == (int, float)


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy


def test_stop_texts_of_one_string_and_of_several() -> None:
    assert SamplingParams(stop="a b").stop_texts == ("a b",)
    assert SamplingParams(stop=("a", "b")).stop_texts == ("a", "b")
    assert SamplingParams().stop_texts == SamplingParams(stop=None).stop_texts == ()
    assert SearchParams(stop=None).stop_texts == ()


def test_the_ends_of_the_ranges() -> None:
    for seed in ((1 << 64) - 1, -(1 << 63)):
        torch.Generator().manual_seed(SamplingParams(seed=seed).seed or 0)
    assert SamplingParams(temperature=1e-6).temperature == 1e-6
