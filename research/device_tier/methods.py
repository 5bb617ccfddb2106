"""Patterns of prompt and answer, and the methods of a run with the budgets of LouisKV's paper."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.methods import POLICIES, KVSwap, SelectionPolicy
from penstock.models.plain_model import PlainKind

SHORT_OUTPUT, SHORT_PROMPT = 1024, 4096
ABLATION = (
    "arkvale", "louiskv:boundaries=every!torch", "louiskv!torch", "louiskv", "louiskv!eager",
    "louiskv:boundaries=every",
)  # fmt: skip
"""LouisKV's Fig. 8d as far as this engine has it: pages at every step; its own units at every step,
by plain torch; retrieval at boundaries; the project's kernels; and what the CUDA graph is worth.
Selection without group consistency has no counterpart: a row is a KV head, and its query heads
share one selection in every method here."""
_OPTION = re.compile(r"^\s*[a-z_]+\s*=")
_PLAIN: Mapping[str, PlainKind] = {"full-dynamic": "dynamic", "full-static": "static"}
Flag = Literal["torch", "eager", "filling", "inline", "parts"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """So many tokens in, so many out."""

    prompt: int
    output: int

    @property
    def text(self) -> str:
        """As it was written."""
        return f"{self.prompt}/{self.output}"

    @property
    def options(self) -> dict[str, Any]:
        """What the paper gives every method in this pattern.

        Source: LouisKV, section 5.2, for S, W and tau (section 5.3 refers to it), and the budgets
        of its Tables 1 and 2: 512 for long input, 1024 for long output.
        """
        if self.output <= SHORT_OUTPUT:
            return {"tau": 0.85, "sink_tokens": 32, "window_tokens": 512, "selected_tokens": 512}
        if self.prompt < SHORT_PROMPT:
            sinks = min(500, self.prompt)
            return {"tau": 0.7, "sink_tokens": sinks, "window_tokens": 128, "selected_tokens": 1024}
        return {"tau": 0.7, "sink_tokens": 64, "window_tokens": 256, "selected_tokens": 1024}


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way of decoding."""

    text: str
    """As it was written; names the row."""
    plain: PlainKind | None = None
    """A cache of transformers in the device's memory."""
    policy: SelectionPolicy | None = None
    memory: str | None = None
    flags: frozenset[str] = frozenset()
    """"torch": plain torch in place of Triton while decoding; "eager": no CUDA graph; "filling":
    what is gathered one layer ahead is by programs that fill the device; "inline": on the stream
    that chooses; "parts": the model's own norms, gates and rotations."""


def parse_patterns(text: str) -> list[Pattern]:
    """Read `PROMPT/OUTPUT,...`.

    Raises:
        ConfigError: a pattern cannot be read.
    """
    found = []
    for word in filter(None, text.split(",")):
        numbers = re.fullmatch(r"\s*(\d+)/(\d+)\s*", word)
        if numbers is None or min(int(numbers[1]), int(numbers[2])) < 1:
            raise ConfigError(f"{word!r} is no pattern; give PROMPT/OUTPUT in tokens: 32768/512")
        found.append(Pattern(int(numbers[1]), int(numbers[2])))
    if not found:
        raise ConfigError("there is no pattern; give for example 32768/512,500/16384")
    return found


def method_texts(text: str) -> list[str]:
    """The methods of a list: commas or semicolons between them, and between options."""
    words: list[str] = []
    for piece in re.split(r"[;,]", text):
        if _OPTION.match(piece) and words:
            words[-1] += f",{piece.strip()}"
        elif piece.strip():
            words.append(piece.strip())
    return list(dict.fromkeys(words))


def parse_method(text: str, pattern: Pattern) -> Method:
    """Read `POLICY[@BUDGET][:option=value,...][!FLAG...]`, "full-dynamic" or "full-static".

    Options that are not given are the paper's for the pattern; KVSwap keeps one selection.

    Raises:
        ConfigError: no such policy, option or flag.
    """
    if text in _PLAIN:
        return Method(text=text, plain=_PLAIN[text])
    words, *flags = text.split("!")
    for flag in flags:
        if flag not in get_args(Flag):
            ends = ", ".join(f"!{name}" for name in get_args(Flag))
            raise ConfigError(f"{text}: there is no {flag!r}; a method may end in {ends}")
    setting = parse_setting(words)
    policy = setting.policy
    given = set(re.findall(r"([a-z_]+)\s*=", words))
    known = {field.name for field in dataclasses.fields(POLICIES[policy.name]) if field.init}
    defaults = {k: v for k, v in pattern.options.items() if k in known - given}
    if "lost_mass" in given:
        defaults.pop("tau", None)
    if isinstance(policy, KVSwap) and "reuse_tokens" not in given:
        chosen = policy.selected_tokens or pattern.options["selected_tokens"]
        defaults["reuse_tokens"] = chosen
    return Method(
        text=text, policy=dataclasses.replace(policy, **defaults), memory=setting.memory,
        flags=frozenset(flags),
    )  # fmt: skip
