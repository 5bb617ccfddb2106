"""Fields of vLLM's SamplingParams that Penstock leaves out, each with what to take instead."""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from penstock.core.errors import ConfigError

Class = TypeVar("Class", bound=type[Any])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A name of vLLM's that has no counterpart here."""

    reason: str
    """Why, and what to take instead; ends a sentence."""
    neutral: tuple[Any, ...] = (None,)
    """Values that ask for nothing, and are taken."""

    def takes(self, value: Any) -> bool:
        """Whether a value asks for nothing."""
        return any(type(value) is type(each) and value == each for each in self.neutral)


_BEAMS = "beams are searched by BeamSearcher with SearchParams"

LEFT_OUT: Mapping[str, LeftOut] = {
    "structured_outputs": LeftOut(
        "answers are not held to a grammar; allowed_token_ids holds them to tokens"
    ),
    "guided_decoding": LeftOut(
        "answers are not held to a grammar; allowed_token_ids holds them to tokens"
    ),
    "output_kind": LeftOut("LLM.stream yields what is new, LLM.generate whole answers"),
    "stream_interval": LeftOut("LLM.stream yields every token"),
    "flat_logprobs": LeftOut("logprobs are lists of dicts", (None, False)),
    "logprob_token_ids": LeftOut("logprobs=-1 has those of all tokens"),
    "prompt_logprob_token_ids": LeftOut("prompt_logprobs=-1 has those of all tokens"),
    "prompt_logprob_start": LeftOut("prompt_logprobs has those of the whole prompt"),
    "thinking_token_budget": LeftOut("max_tokens bounds thoughts and answer together", (None, -1)),
    "repetition_detection": LeftOut("frequency_penalty and max_tokens bound repetition"),
    "extra_args": LeftOut("there are no plugins; logits_processors takes functions"),
    "skip_reading_prefix_cache": LeftOut(
        "no cache is shared between calls; a Document keeps one", (None, True)
    ),
    "trace_decode_token_ids": LeftOut("prompt_logprobs scores a given text"),
    "routed_experts_prompt_start": LeftOut("routing of experts is not returned", (None, 0)),
    "skip_clone": LeftOut("settings are always copied", (None, False)),
    "output_text_buffer_length": LeftOut("it follows from stop", (None, 0)),
    "use_beam_search": LeftOut(_BEAMS, (None, False)),
    "length_penalty": LeftOut(_BEAMS, (None, 1.0)),
    "early_stopping": LeftOut(_BEAMS, (None, False)),
}
"""By name; the last three are of releases before 0.7."""


def refuses_unknown(left_out: Mapping[str, LeftOut]) -> Callable[[Class], Class]:
    """A decorator of a dataclass: names that it does not have are a ConfigError, not a TypeError.

    Args:
        left_out: names that are refused with their reason, and taken at their neutral values.
    """

    def decorate(cls: Class) -> Class:
        init, known = cls.__init__, {field.name for field in fields(cls)}

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            refuse(cls.__name__, given.keys() - known, given, left_out)
            init(self, *args, **{name: given[name] for name in given if name in known})

        cls.__init__ = checked
        return cls

    return decorate


def refuse(
    where: str, names: Collection[str], given: Mapping[str, Any], left_out: Mapping[str, LeftOut]
) -> None:
    """Refuse arguments, but for those that ask for nothing.

    Args:
        where: they were given, for the message.
        names: those among `given` to look at.

    Raises:
        ConfigError: names the first of them, with its reason if it is known.
    """
    for name in sorted(names):
        if name not in left_out:
            raise ConfigError(f"{where} has no {name}")
        if not left_out[name].takes(given[name]):
            raise ConfigError(f"{where} has no {name}: {left_out[name].reason}")
