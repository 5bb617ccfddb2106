"""SamplingParams: how the next token is chosen and when an answer ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from penstock.core.errors import ConfigError

LOWEST_TEMPERATURE = 1e-6
"""Below it, and above 0, quotients leave the range of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of one call, under the names that vLLM gives them.

    What is not named here (a repetition penalty, say) stays as the model's own
    `generation_config` has it.

    Raises:
        ConfigError: a field is out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = 1.0
    """Sample among the most probable tokens that hold this share of the mass, in (0, 1]."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 (or -1) is all of them."""
    max_tokens: int = 16
    """Most new tokens per prompt."""
    seed: int | None = None
    """Makes sampling repeatable without touching torch's global generator state; -2**63 to
    2**64 - 1."""
    stop: str | tuple[str, ...] | None = ()
    """The answer ends before the first of these strings, or of those that the model's own
    `generation_config` has; None: there are none."""

    def __post_init__(self) -> None:
        whole, real = ("top_k", "max_tokens", "seed"), ("temperature", "top_p")
        check_kinds(self, whole=whole, real=real)
        check_temperature(self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.top_k < -1:
            raise ConfigError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed} must lie in -2**63 to 2**64 - 1")
        if any(not text for text in self.stop_texts):
            raise ConfigError("stop holds an empty string, which would end every answer at once")
        make_plain(self, whole=whole, real=real)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def check_kinds(params: Any, *, whole: Sequence[str], real: Sequence[str]) -> None:
    """Refuse settings that are of another kind, before they are compared with their ranges.

    Args:
        whole: fields that are whole numbers; `seed` may be None.
        real: fields that are numbers.

    Raises:
        ConfigError: names the field, or what `stop` holds.
    """
    kinds: list[tuple[str, type, str]] = [(name, Integral, "a whole number") for name in whole]
    kinds += [(name, Real, "a number") for name in real]
    for name, kind, words in kinds:
        value = getattr(params, name)
        if not isinstance(value, kind) and not (name == "seed" and value is None):
            raise ConfigError(f"{name}={value!r} must be {words}")
    texts = () if params.stop is None or isinstance(params.stop, str) else params.stop
    if not isinstance(texts, Collection) or any(not isinstance(text, str) for text in texts):
        raise ConfigError(f"stop={params.stop!r} must be a text, or a list of texts")


def make_plain(params: Any, *, whole: Sequence[str], real: Sequence[str]) -> None:
    """Turn checked settings into Python's own kinds: transformers takes no whole number for a
    temperature and no number of numpy, and JSON no number of numpy.

    Args:
        params: a frozen dataclass, changed in place.
        whole, real: as for `check_kinds`.

    Raises:
        ConfigError: a number is larger than a float can be.
    """
    for names, kind in ((whole, int), (real, float)):
        for name in names:
            value = getattr(params, name)
            try:
                plain = None if value is None else kind(value)
            except OverflowError as error:
                raise ConfigError(f"{name} is too large for a floating-point number") from error
            object.__setattr__(params, name, plain)


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that nothing can be sampled with.

    Raises:
        ConfigError: says which can.
    """
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature < float("inf")):
        raise ConfigError(
            f"temperature={temperature} must be 0 (greedy), or a number from "
            f"{LOWEST_TEMPERATURE:g} on"
        )
