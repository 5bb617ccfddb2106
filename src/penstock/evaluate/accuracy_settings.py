"""Settings of the accuracy benchmark: a policy, its options and a budget, written as one word."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.core.errors import ConfigError
from penstock.methods import POLICIES, SelectionPolicy

_OPTION = re.compile(r"^\s*[a-z_]+\s*=")
_WORDS: Mapping[str, Any] = MappingProxyType({"none": None, "true": True, "false": False})

ABLATIONS = (
    "full",
    "kvswap@1/13",
    "kvswap@1/13:window_tokens=0",
    "kvswap@1/13:reuse_tokens=0",
    *(f"kvswap@1/13:group_tokens={g}" for g in (1, 2, 8)),
    *(f"kvswap@1/13:selected_tokens={n}" for n in (100, 200, 800)),
    "kvswap@1/13:head_reduction=sum",
    "kvswap@1/13:attend=selected",
    "kvswap@1/13:predict=false",
)
"""KVSwap's section 6 and our own choices, one change at a time; G = 4 and MG = 400 are the base."""

LOUISKV_PAPER = (
    "louiskv:tau=0.85,sink_tokens=32,window_tokens=512,selected_tokens=512",
    "louiskv:tau=0.7,sink_tokens=500,window_tokens=128,selected_tokens=1024",
    "louiskv:tau=0.7,sink_tokens=64,window_tokens=256,selected_tokens=1024",
)
"""LouisKV's section 5.2: long input (Llama-3.1-8B); long output, then both (Qwen3-8B)."""
_LOUISKV_VARIANTS = (
    *(f"tau={tau}" for tau in (0.6, 0.7, 0.75, 0.8, 0.85)),
    *(f"boundaries=stride:{steps}" for steps in (2, 4, 8)),
    "boundaries=every",
    "boundaries=every,units=pages",
)
LOUISKV_ABLATIONS = (
    "full",
    *(
        setting
        for budget in (256, 512)
        for setting in (
            f"quest:selected_tokens={budget}",
            f"arkvale:selected_tokens={budget}",
            *(
                f"louiskv:selected_tokens={budget},window_tokens=64,sink_tokens=4,{variant}"
                for variant in _LOUISKV_VARIANTS
            ),
        )
    ),
)
"""LouisKV's section 5.4 and appendix D: tau, fixed strides, and pages against its own units; beside
the methods of its Tab. 1 that retrieve, with the window and sinks that they have here."""

_UNLIMITED = frozenset({"full", "flexgen"})
_SUITE_OPTIONS = MappingProxyType({"louiskv": ":window_tokens=64,sink_tokens=4"})
"""What the methods share where a method's own defaults are others (see BaselinePolicy)."""
PAPER_SUITE = (
    "full",
    *(
        f"{name}@{budget}{_SUITE_OPTIONS.get(name, '')}"
        for budget in ("1/13", "1/34")
        for name in POLICIES
        if name not in _UNLIMITED
    ),
)
"""Every method at KVSwap's two budgets (setting A of section 4.3), full attention first."""
REAL_POLICIES = (
    "full", "kvswap", "quest", "arkvale", "shadowkv", "infinigen", "snapkv", "pqcache",
    f"louiskv{_SUITE_OPTIONS['louiskv']}", "dynakv",
)  # fmt: skip
"""What the suite real compares, each at the budgets of --fractions."""
_LISTS: Mapping[str, Sequence[str]] = MappingProxyType({
    "ablations": ABLATIONS, "louiskv-paper": LOUISKV_PAPER, "louiskv-ablations": LOUISKV_ABLATIONS,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of answering."""

    text: str
    """As it was written; names the row."""
    policy: SelectionPolicy
    memory: str | None
    """Budget, or None for all that the cache takes."""


def parse_setting(text: str) -> Setting:
    """Read `POLICY[@BUDGET][:option=value,...]`, for example `kvswap@1/13:group_tokens=8`.

    Raises:
        ConfigError: no such policy or option, or the value makes no sense.
    """
    head, _, options = text.strip().partition(":")
    name, _, memory = head.partition("@")
    kind = POLICIES.find(name)
    known = {field.name for field in dataclasses.fields(kind)}
    chosen: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in known:
            raise ConfigError(
                f"{name} has no option {key!r}; there are {', '.join(sorted(known)) or 'none'}"
            )
        chosen[key] = _value(value)
    try:
        policy = kind(**chosen)
    except TypeError as error:
        raise ConfigError(f"cannot read the setting {text!r}: {error}") from error
    return Setting(text.strip(), policy, memory or None)


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Read lists of settings separated by commas or semicolons; "ablations", "louiskv-paper" and
    "louiskv-ablations" stand for lists.

    Raises:
        ConfigError: a setting cannot be read, or there is none.
    """
    words: list[str] = []
    for piece in re.split(r"[;,]", ",".join(texts)):
        if _OPTION.match(piece) and words:
            words[-1] += f",{piece.strip()}"
        elif piece.strip() in _LISTS:
            words.extend(_LISTS[piece.strip()])
        elif piece.strip():
            words.append(piece.strip())
    if not words:
        raise ConfigError("there is no setting; give for example full,kvswap@1/13")
    return [parse_setting(word) for word in dict.fromkeys(words)]


def at_fractions(texts: Sequence[str], fractions: Sequence[str]) -> list[str]:
    """Settings with a budget: those that name none get each of the fractions, in their order.

    Policies that keep everything need none.

    Raises:
        ConfigError: a setting cannot be read, or there is none.
    """
    settings = parse_settings(texts)
    words: dict[str, None] = {}
    for fraction in fractions:
        for setting in settings:
            text = setting.text
            if setting.memory is None and setting.policy.name not in _UNLIMITED:
                name, colon, options = text.partition(":")
                text = f"{name}@{fraction}{colon}{options}"
            words[text] = None
    return list(words)


def short_names(settings: Sequence[str]) -> dict[str, str]:
    """Names for tables and figures: without options, where that leaves only one of that name."""
    heads = [text.partition(":")[0] for text in settings]
    return {
        text: text if heads.count(head) > 1 else head
        for text, head in zip(settings, heads, strict=True)
    }


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
