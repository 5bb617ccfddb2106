"""Whether plain data, such as a JSON file holds, fits a type annotation."""

import math
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def fits(value: object, annotation: Any) -> bool:
    """Whether a value is of an annotated type, as exactly as JSON can say.

    A whole number is a float too, True is no number, infinity and NaN are none either, a tuple is
    given as a list, a `TypedDict` has all of its keys, and a dataclass is any dict.

    Args:
        value: plain data: None, bool, int, float, str, lists and dicts of these.
        annotation: as `get_type_hints` gives it; one of these types, `Any`, a union, `Literal`,
            `tuple[X, ...]`, `dict[str, X]`, a `TypedDict` or a dataclass.
    """
    if annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is tuple:
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(key, str) and fits(each, arguments[1]) for key, each in value.items()
        )
    if is_typeddict(annotation):
        hints = get_type_hints(annotation)
        return isinstance(value, dict) and all(
            key in value and fits(value[key], hint) for key, hint in hints.items()
        )
    if is_dataclass(annotation):
        return isinstance(value, dict)
    if annotation is float:
        return type(value) is int or (isinstance(value, float) and math.isfinite(value))
    return type(value) is (NoneType if annotation is None else annotation)
