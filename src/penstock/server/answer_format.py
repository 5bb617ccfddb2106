"""AnswerFormat: how a model writes thoughts and calls of tools, and an AnswerReader of it."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from penstock.core.errors import PenstockError
from penstock.generation.chat_template import (
    ChatTemplate,
    Message,
    has_chat_template,
    template_owner,
)
from penstock.models.loader import LoadedModel

Style = Literal["json", "function", "template"]
"""What stands between the marks of a call: {"name": ..., "arguments": {...}}, or
<function=NAME><parameter=KEY>VALUE</parameter></function>; or the tokenizer says it by itself
(`response_template`)."""
Thoughts = Literal["none", "begun", "may"]
"""Whether an answer begins with thoughts: it does not, the prompt has begun them, or it may."""
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PROBE = {
    "type": "function",
    "function": {
        "name": "penstock_probe",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_REASONING = ("reasoning_content", "reasoning", "thinking")
_INSTRUCTIONS = """You may call functions. Their signatures are:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


class Call(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON."""


class Piece(NamedTuple):
    """A part of an answer."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


class AnswerReader(Protocol):
    """Reads one answer as it comes."""

    def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""

    def finish(self) -> list[Piece]:
        """The rest; the answer is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """The format of one model's answers."""

    style: Style
    """Of calls."""
    is_own: bool
    """Whether the chat template writes the tools; else a system message does."""
    thinks: bool
    """Whether the template knows thoughts between <think> and </think>."""
    tokenizer: Any

    @classmethod
    def of(cls, loaded: LoadedModel) -> "AnswerFormat":
        """Look at the chat template: its words are those that the model has learnt."""
        owner, tokenizer = template_owner(loaded), loaded.tokenizer
        said = getattr(owner, "chat_template", None) if has_chat_template(owner) else None
        text = "\n".join(map(str, said.values())) if isinstance(said, Mapping) else str(said or "")
        shows = _shows_tools(owner) if said else False
        style: Style = "function" if "<function=" in text else "json"
        is_own = shows and CALL_OPEN in text
        described = getattr(tokenizer, "response_template", None) is not None
        if shows and described and hasattr(tokenizer, "get_response_parser"):
            style, is_own = "template", True
        return cls(
            style=style if is_own else "json", is_own=is_own, thinks=THINK_CLOSE in text,
            tokenizer=tokenizer,
        )  # fmt: skip

    @property
    def keeps_special(self) -> bool:
        """Whether answers with tools are read with the text of their special tokens."""
        if self.style == "template":
            return True
        return CALL_OPEN in (getattr(self.tokenizer, "all_special_tokens", None) or ())

    def prepared(
        self, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[list[Message], Sequence[Any] | None]:
        """Messages and tools for the chat template; where it knows no tools, messages alone."""
        if self.is_own:
            return list(messages), tools or None
        plain = [_in_words(message) for message in messages]
        if not tools:
            return plain, None
        said = _INSTRUCTIONS.format(tools="\n".join(json.dumps(each) for each in tools))
        first, *rest = plain
        if first.get("role") == "system" and isinstance(first.get("content"), str):
            return [{**first, "content": f"{first['content']}\n\n{said}"}, *rest], None
        return [{"role": "system", "content": said}, *plain], None

    def reader(self, prompt: str, *, has_tools: bool) -> AnswerReader:
        """What reads an answer.

        Args:
            prompt: the text that it stands behind, which may begin its thoughts.
            has_tools: whether calls are looked for.
        """
        if has_tools and self.style == "template":
            return _TemplateReader(self.tokenizer, prompt)
        return _MarkReader(
            call=_parsers[self.style] if has_tools else None, thinks=self.thinks,
            begins_thinking=self.thoughts(prompt) == "begun",
        )  # fmt: skip

    def thoughts(self, prompt: str) -> Thoughts:
        """What an answer behind a prompt begins with."""
        end = prompt.rstrip()
        if not self.thinks or end.endswith(THINK_CLOSE):
            return "none"
        return "begun" if end.endswith(THINK_OPEN) else "may"


def _shows_tools(owner: Any) -> bool:
    messages = [{"role": "user", "content": "?"}]
    try:
        with_tools = ChatTemplate(tools=[_PROBE]).render(owner, messages)
    except PenstockError:
        return False
    return "penstock_probe" in with_tools


def _in_words(message: Message) -> Message:
    """A message without fields that a template without tools knows nothing of."""
    calls, role = message.get("tool_calls") or (), message.get("role")
    content = message.get("content") or ""
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_plain(content)}\n</tool_response>"}
    if not calls:
        return message
    said = [
        f"{CALL_OPEN}\n{_call_text(call.get('function') or {})}\n{CALL_CLOSE}"
        for call in calls
        if isinstance(call, Mapping)
    ]
    return {"role": role, "content": "\n".join(filter(None, [_plain(content), *said]))}


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(each.get("text", "")) for each in parts if isinstance(each, Mapping))


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}'


def call_id() -> str:
    """A name for a call."""
    return f"call_{secrets.token_hex(12)}"


def _as_call(name: Any, arguments: Any) -> Call | None:
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return Call(call_id(), name, arguments)
    return Call(call_id(), name, json.dumps({} if arguments is None else arguments))


def _json_call(text: str) -> Call | None:
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    inner = said.get("function")
    said = inner if isinstance(inner, dict) else said
    return _as_call(said.get("name"), said.get("arguments", said.get("parameters")))


def _function_call(text: str) -> Call | None:
    found = _FUNCTION.search(text)
    if found is None:
        return _json_call(text)
    given = {name.strip(): _value(value) for name, value in _PARAMETER.findall(found[2])}
    return _as_call(found[1].strip(), given)


def _value(text: str) -> Any:
    """A parameter's value: JSON where it is an object, a list, a number, true, false or null."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_parsers: Mapping[str, Callable[[str], Call | None]] = {
    "json": _json_call,
    "function": _function_call,
}


@dataclass
class _MarkReader:
    """Looks for marks in a text; holds back what may be the beginning of one."""

    call: Callable[[str], Call | None] | None
    thinks: bool
    begins_thinking: bool
    _held: str = ""
    _state: str = field(default="", init=False)
    _is_new: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._state = "reasoning" if self.begins_thinking else "text"

    def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """The rest; a call without its end is tried too, and is text if it is none."""
        rest, self._held = self._held, ""
        if self._state == "call":
            return [self._called(rest, closed=False)]
        if self._state == "reasoning":
            return [Piece("reasoning", rest)] if rest else []
        return [Piece("text", rest)] if rest and (rest.strip() or self.call is None) else []

    def _step(self, found: list[Piece]) -> bool:
        """Take one thing off the held text; false when more must come first."""
        if self._is_new and self._state == "text" and self.thinks:
            self._held = self._held.lstrip("\n")
        marks = {
            "reasoning": [THINK_CLOSE],
            "call": [CALL_CLOSE],
            "text": [THINK_OPEN] * (self.thinks and self._is_new)
            + [CALL_OPEN] * (self.call is not None),
        }[self._state]
        places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not places:
            if self._state != "call":
                self._release(found, len(self._held) - self._kept(marks))
            return False
        at, mark = min(places)
        if self._state == "call":
            found.append(self._called(self._held[:at], closed=True))
        else:
            before = self._held[:at]
            self._release(found, len(before.rstrip()) if mark == CALL_OPEN else at)
            at = self._held.find(mark)
        self._held = self._held[at + len(mark) :]
        self._state = {
            THINK_OPEN: "reasoning", THINK_CLOSE: "text", CALL_OPEN: "call", CALL_CLOSE: "text",
        }[mark]  # fmt: skip
        self._is_new = mark == THINK_CLOSE
        return True

    def _kept(self, marks: Sequence[str]) -> int:
        """Characters at the end that may begin a mark, and blanks that may stand before one."""
        longest = max(
            (n for mark in marks for n in range(1, len(mark)) if self._held.endswith(mark[:n])),
            default=0,
        )
        if self._state == "text" and self.call is not None:
            body = self._held[: len(self._held) - longest]
            longest += len(body) - len(body.rstrip())
        return longest

    def _release(self, found: list[Piece], count: int) -> None:
        text, self._held = self._held[:count], self._held[count:]
        if not text:
            return
        if self._state == "reasoning":
            found.append(Piece("reasoning", text))
            return
        self._is_new = False
        found.append(Piece("text", text))

    def _called(self, text: str, *, closed: bool) -> Piece:
        assert self.call is not None
        call = self.call(text.strip())
        if call is None:
            return Piece("text", f"{CALL_OPEN}{text}{CALL_CLOSE if closed else ''}")
        return Piece("call", call=call)


class _TemplateReader:
    """By the tokenizer's own description of its answers, as transformers reads it."""

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        """Begin behind a prompt."""
        self._parser = tokenizer.get_response_parser(prefix=prompt)

    def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        return self._pieces(self._parser.feed(text))

    def finish(self) -> list[Piece]:
        """The rest."""
        _, events = self._parser.finalize()
        return self._pieces(events)

    @staticmethod
    def _pieces(events: Sequence[Mapping[str, Any]]) -> list[Piece]:
        found = []
        for event in events:
            name, text = event.get("field"), event.get("text") or ""
            if event["type"] == "region_chunk" and not event.get("dirty") and text:
                if name == "content":
                    found.append(Piece("text", text))
                elif name in _REASONING:
                    found.append(Piece("reasoning", text))
            elif event["type"] == "region_close" and name == "tool_calls":
                value = event.get("value")
                for each in value if isinstance(value, list) else [value]:
                    said = each.get("function", each) if isinstance(each, Mapping) else {}
                    call = _as_call(said.get("name"), said.get("arguments"))
                    if call is not None:
                        found.append(Piece("call", call=call))
        return found
