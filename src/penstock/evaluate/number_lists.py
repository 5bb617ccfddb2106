"""Numbers with commas between them, as programs take them on the command line."""

import math
from collections.abc import Callable
from typing import TypeVar

from penstock.core.errors import ConfigError

Number = TypeVar("Number", int, float)


def whole_numbers(
    text: str, option: str, *, least: int = 1, may_be_empty: bool = False
) -> list[int]:
    """Whole numbers in their order, each once.

    Args:
        text: for example "1024,2048".
        option: of the command line, for the error.
        least: smallest of them that makes sense.
        may_be_empty: no number at all is an answer too.

    Raises:
        ConfigError: they are not.
    """
    return _numbers(text, option, int, least, "16,32", may_be_empty=may_be_empty)


def real_numbers(text: str, option: str, *, may_be_empty: bool = False) -> list[float]:
    """Numbers from 0 on in their order, each once; as `whole_numbers`.

    Raises:
        ConfigError: they are not.
    """
    return _numbers(text, option, float, 0.0, "0.1,0.2", may_be_empty=may_be_empty)


def _numbers(
    text: str, option: str, kind: Callable[[str], Number], least: Number, example: str,
    *, may_be_empty: bool,
) -> list[Number]:  # fmt: skip
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        found = list(dict.fromkeys(kind(word) for word in words))
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers like {example}, not {text!r}") from error
    if not found and not may_be_empty:
        raise ConfigError(f"{option} takes numbers like {example}; give at least one")
    for one in found:
        if not (math.isfinite(one) and one >= least):
            raise ConfigError(f"{option} takes numbers from {least} on, not {one}")
    return found
