"""SamplingParams: how the next token is chosen and when an answer ends, as vLLM has it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeAlias

from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.generation.sampling_fields import LEFT_OUT, refuses_unknown

LogitsProcessor: TypeAlias = Callable[..., Tensor]
"""`f(answer_token_ids, logits)` or `f(prompt_token_ids, answer_token_ids, logits)`."""

LOWEST_TEMPERATURE = 1e-6
"""Below it, and above 0, quotients leave the range of float32."""


@refuses_unknown(LEFT_OUT)
@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of a prompt's answers, under the names and with the meanings of vLLM.

    They are all that counts: of the model's own `generation_config`, only what ends an answer is
    taken besides (its end-of-sequence tokens and stop strings). What vLLM has and Penstock has not
    is refused by name. Fields may be assigned; a call checks them again, and takes a copy.

    Raises:
        ConfigError: a field is unknown, left out, or out of its range.
    """

    n: int = 1
    """Answers per prompt. The prompt is read once; its KV is shared."""
    best_of: int | None = None
    """Make so many answers, and return the `n` of the highest `cumulative_logprob`."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer has; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token as often as the answer has it; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of prompt and answer, and multiplies negative ones."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = 1.0
    """Sample among the most probable tokens that hold this share of the mass, in (0, 1]."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 (or -1) is all of them."""
    min_p: float = 0.0
    """Sample among tokens at least this share as probable as the most probable one, in [0, 1]."""
    seed: int | None = None
    """Makes sampling repeatable, whatever else is in the batch, without touching torch's global
    generator state; -2**63 to 2**64 - 1, where -1 is None. Of `n` answers, the next has the next
    seed."""
    stop: str | Sequence[str] | None = None
    """The answer ends before the first of these strings, or of those that the model's own
    `generation_config` has."""
    stop_token_ids: Sequence[int] | None = None
    """The answer ends with the first of these tokens, whose text is left out."""
    bad_words: Sequence[str] | None = None
    """Texts that the answer may not have: their last token is not chosen behind the others."""
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop string, or the text of the stop token."""
    ignore_eos: bool = False
    """Whether the answer goes on behind an end-of-sequence token."""
    max_tokens: int | None = 16
    """Most new tokens; None: as many as the model's positions (or `max_model_len`) have room
    for."""
    min_tokens: int = 0
    """New tokens before an end-of-sequence or stop token may be chosen, or a stop string counts."""
    logprobs: int | None = None
    """Return logarithms of the probabilities of this many most probable tokens per new token, and
    of the token itself; of the model's own distribution, before penalties and temperature. -1: of
    all tokens."""
    prompt_logprobs: int | None = None
    """The same per token of the prompt, but for the first."""
    detokenize: bool = True
    """Whether answers have a text."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""
    spaces_between_special_tokens: bool = True
    """Whether a special token behind another may begin with a space."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of tokens, by their id."""
    allowed_token_ids: Sequence[int] | None = None
    """Choose among these tokens alone."""
    truncate_prompt_tokens: int | None = None
    """Read the last so many tokens of the prompt alone; -1: as many as leave room for an answer."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Functions of the answer's tokens so far and the logits [vocabulary] to new logits; with three
    parameters, the prompt's tokens come first. They come before all else."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        check_kinds(self, whole=_WHOLE, real=_REAL, optional=_OPTIONAL)
        check_temperature(self.temperature)
        self._check_ranges()
        self._check_texts()
        self._check_tokens()
        make_plain(self, whole=_WHOLE, real=_REAL)
        if self.seed == -1:
            self.seed = None

    def _check_ranges(self) -> None:
        for name, least, words in _LEAST:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be {words}")
        for name, low, high in (
            ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2), ("min_p", 0, 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value} must lie in [{low}, {high}]")
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens=0 leaves no prompt; give 1 or more, or -1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"repetition_penalty={self.repetition_penalty} must be above 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed} must lie in -2**63 to 2**64 - 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than {self.max_tokens=}")
        if self.num_answers < self.n:
            raise ConfigError(f"best_of={self.best_of} must be at least n={self.n}")
        if self.is_greedy and self.num_answers > 1:
            raise ConfigError(
                f"{self.num_answers} answers of greedy decoding are the same; set a temperature "
                "above 0, or n=1"
            )

    def _check_texts(self) -> None:
        if any(not text for text in self.stop_texts):
            raise ConfigError("stop holds an empty string, which would end every answer at once")
        if self.stop_texts and not self.detokenize:
            raise ConfigError("stop needs the text of an answer: set detokenize=True")
        words = self.bad_words
        if isinstance(words, str) or not _is_list(words, str) or any(not w for w in words or ()):
            raise ConfigError(f"bad_words={words!r} must be a list of texts, none of them empty")

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if not _is_list(ids, Integral):
                raise ConfigError(f"{name}={ids!r} must be a list of token ids")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise ConfigError("allowed_token_ids is empty, so that no token could be chosen")
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, Mapping)
            and _is_list(list(bias), Integral)
            and _is_list(list(bias.values()), Real)
        ):
            raise ConfigError(f"logit_bias={bias!r} must be numbers by token id")
        functions = self.logits_processors
        if functions is not None and not _is_list(functions, Callable):
            raise ConfigError(f"logits_processors={functions!r} must be a list of functions")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_answers(self) -> int:
        """Answers to make per prompt."""
        return self.n if self.best_of is None else self.best_of

    def clone(self) -> "SamplingParams":
        """A copy, checked again.

        Raises:
            ConfigError: a field was assigned what is out of its range.
        """
        return replace(self)

    def check_vocabulary(self, size: int) -> None:
        """Refuse tokens that a model does not have.

        Raises:
            ConfigError: names the field and the token.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < size:
                    raise ConfigError(f"{name} has token {token}, but the model has {size:,}")


_WHOLE = ("n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs",
          "prompt_logprobs", "truncate_prompt_tokens")  # fmt: skip
_REAL = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
         "min_p")  # fmt: skip
_OPTIONAL = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs",
             "truncate_prompt_tokens")  # fmt: skip
_LEAST = (
    ("n", 1, "at least 1"),
    ("best_of", 1, "at least 1"),
    ("top_k", -1, "0 (all tokens) or more"),
    ("max_tokens", 1, "at least 1"),
    ("min_tokens", 0, "0 or more"),
    ("logprobs", -1, "0 or more, or -1 (all tokens)"),
    ("prompt_logprobs", -1, "0 or more, or -1 (all tokens)"),
    ("truncate_prompt_tokens", -1, "at least 1, or -1"),
)


def _is_list(values: Any, kind: Any) -> bool:
    """Whether it is None, or a collection of a kind."""
    return values is None or (
        isinstance(values, Collection) and all(isinstance(value, kind) for value in values)
    )


def check_kinds(
    params: Any, *, whole: Sequence[str], real: Sequence[str], optional: Sequence[str] = ("seed",)
) -> None:
    """Refuse settings that are of another kind, before they are compared with their ranges.

    Args:
        whole: fields that are whole numbers.
        real: fields that are numbers.
        optional: fields that may be None.

    Raises:
        ConfigError: names the field, or what `stop` holds.
    """
    kinds: list[tuple[str, type, str]] = [(name, Integral, "a whole number") for name in whole]
    kinds += [(name, Real, "a number") for name in real]
    for name, kind, words in kinds:
        value = getattr(params, name)
        if not isinstance(value, kind) and not (name in optional and value is None):
            raise ConfigError(f"{name}={value!r} must be {words}")
    texts = () if params.stop is None or isinstance(params.stop, str) else params.stop
    if not isinstance(texts, Collection) or any(not isinstance(text, str) for text in texts):
        raise ConfigError(f"stop={params.stop!r} must be a text, or a list of texts")


def make_plain(params: Any, *, whole: Sequence[str], real: Sequence[str]) -> None:
    """Turn checked settings into Python's own kinds: transformers takes no whole number for a
    temperature and no number of numpy, and JSON no number of numpy.

    Args:
        params: a dataclass, changed in place.
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
