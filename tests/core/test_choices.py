"""Choices are well formed, and annotations are held against plain data."""

from typing import Any, Literal, TypedDict

import pytest

from penstock.core.choices import Choice
from penstock.core.plain_data import fits


class _Pair(TypedDict):
    left: int
    right: float | None


def test_a_choice_has_values_and_none_twice() -> None:
    assert Choice("rank", (64, None), "components").values == (64, None)
    with pytest.raises(AssertionError, match="no values"):
        Choice("rank", (), "components")
    with pytest.raises(AssertionError, match="twice"):
        Choice("rank", (4, 8, 4), "components")


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (4, int, True), (4.0, int, False), (True, int, False), ("4", int, False),
        (4, float, True), (0.5, float, True), (True, float, False),
        (float("nan"), float, False), (float("inf"), float, False), (10**400, float, True),
        (True, bool, True), (1, bool, False), ("a", str, True), (None, str, False),
        (None, None, True), (0, None, False),
        (None, int | None, True), (3, int | None, True), ("3", int | None, False),
        (8, Literal[8, 4] | None, True), (True, Literal[1, 2], False), (5, Literal[8, 4], False),
        ([1, 2], tuple[int, ...], True), ([1, "2"], tuple[int, ...], False),
        ({"a": 1}, dict[str, int], True), ({"a": "1"}, dict[str, int], False),
        ([], dict[str, int], False), ({"left": 1, "right": None}, _Pair, True),
        ({"left": 1}, _Pair, False), ({"left": "1", "right": 2.0}, _Pair, False),
        ([{}], tuple[Choice, ...], True), ([3], tuple[Choice, ...], False),
        (object(), Any, True),
    ],
)  # fmt: skip
def test_plain_data_fits_its_annotation(value: object, annotation: Any, expected: bool) -> None:
    assert fits(value, annotation) is expected
