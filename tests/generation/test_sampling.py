"""SamplingParams refuses what cannot be meant."""

from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.generation.sampling import SamplingParams


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
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


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy


def test_stop_texts_of_one_string_and_of_several() -> None:
    assert SamplingParams(stop="a b").stop_texts == ("a b",)
    assert SamplingParams(stop=("a", "b")).stop_texts == ("a", "b")
    assert SamplingParams().stop_texts == ()
