"""ChatHistory: the messages of a chat, and the tokens that a cache holds of them."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import DocumentDamagedError
from penstock.generation.chat_template import ChatTemplate, Message, template_owner
from penstock.generation.prompts import TokenIds, encode, first_tokens
from penstock.models.loader import LoadedModel
from penstock.models.processing import KINDS, Drawn, draw_out, encode_drawn
from penstock.models.visuals import Visual, common_beginning

CHAT = "chat"
"""Blob of a document that is a chat: what `ChatHistory.as_bytes` gives."""
_FORMAT, _WITH_PICTURES = 1, 2
_NEXT_WORDS = ("0", "x")
"""Two ways in which a message may go on; what their tokens have in common does not depend on it."""


class ChatHistory:
    """Messages and tokens of a chat.

    A template renders the whole history for each turn. What the model said came as tokens, which
    need not be those that the tokenizer makes of its text. So the tokens stay, where the text
    that they stand for begins the new rendering, and only what is behind them is encoded.

    Attributes:
        messages: so far, answers included
        attached: texts that come in front of the next message
        tokens: those that the cache holds, and perhaps the last one of an answer behind them
        drawn: the pictures of all messages, in order
        max_tokens: most that the chat was begun for
    """

    def __init__(self, loaded: LoadedModel, template: ChatTemplate, max_tokens: int) -> None:
        self._loaded, self._template = loaded, template
        self.messages: list[dict[str, Any]] = []
        self.attached: list[str] = []
        self.tokens = TokenIds([])
        self.drawn: list[Drawn] = []
        self.max_tokens = max_tokens
        self._text = ""
        self._marks: list[tuple[int, int]] = []
        """So many first characters of the text are so many first tokens; ascending."""

    def message_of(self, text: str, drawn: Sequence[Drawn] = ()) -> dict[str, Any]:
        """The next message of the user, with what is attached in front, and then its pictures."""
        if not drawn:
            return {"role": "user", "content": "\n\n".join([*self.attached, text])}
        before = "\n\n".join([*self.attached, ""])
        parts = [{"type": "text", "text": before}] if before else []
        parts += [{"type": each.kind} for each in drawn]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def render(self, message: Message, drawn: Sequence[Drawn] = ()) -> tuple[str, TokenIds]:
        """The prompt for the next turn, as text and as tokens.

        Args:
            drawn: pictures of the message.

        Raises:
            PromptError, ConfigError: as for `ChatTemplate.render`.
        """
        owner = template_owner(self._loaded)
        text = self._template.render(owner, [*self.messages, message])
        text, pictures = draw_out(self._loaded, text, [*self.drawn, *drawn])
        ids = self._encoded(text, pictures)
        if ids[: len(self.tokens)] == self.tokens:
            return text, ids
        for size, count in reversed(self._marks):
            known = [each for each in self.tokens.visuals if each.end <= count]
            alike = zip(known, pictures, strict=False)
            if text.startswith(self._text[:size]) and all(
                a.digest == b.visual.digest for a, b in alike
            ):
                rest = self._encoded(text[size:], pictures[len(known) :])
                if rest and ids[-len(rest) :] == rest:  # no token lies across the border
                    new = [each.moved(count) for each in rest.visuals]
                    return text, TokenIds([*self.tokens[:count], *rest], visuals=[*known, *new])
        return text, ids

    def _encoded(self, text: str, pictures: Sequence[Drawn]) -> TokenIds:
        if not pictures:
            return TokenIds(encode(self._loaded, text, what="the conversation", alone=False))
        encoded = encode_drawn(self._loaded, text, pictures, alone=False)
        return TokenIds(encoded.ids, visuals=encoded.visuals)

    def render_beginning(self) -> TokenIds:
        """Tokens of the prompt as far as what is attached decides them, whatever is said then."""
        first, second = (self.render(self.message_of(word))[1] for word in _NEXT_WORDS)
        return first_tokens(first, shared_beginning(first, second))

    def answered(
        self, message: Message, answer: str, prompt: str, ids: TokenIds, new: list[int],
        drawn: Sequence[Drawn] = (),
    ) -> None:  # fmt: skip
        """Take a turn in.

        Args:
            answer: the text of the answer.
            prompt: that was rendered for it.
            ids: tokens of the prompt.
            new: tokens of the answer, without the one that ended it.
            drawn: pictures of the message.
        """
        self.messages += [dict(message), {"role": "assistant", "content": answer}]
        self.attached = []
        self.drawn += drawn
        self.tokens = TokenIds([*ids, *new], visuals=ids.visuals)
        tokenizer: Any = self._loaded.tokenizer
        said = tokenizer.decode(new, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._text, self._marks = prompt + answer, [(len(prompt), len(ids))]
        if said == answer:  # not where a stop string or a special token was not shown
            self._marks.append((len(self._text), len(self.tokens)))

    def holds(self, tokens: TokenIds) -> None:
        """The cache has these tokens now, whatever became of a turn."""
        same = shared_beginning(self.tokens, tokens)
        self._marks = [(size, count) for size, count in self._marks if count <= same]
        self.tokens = tokens

    def clear(self) -> None:
        """Forget all but the system prompt."""
        system = self.system
        self.messages, self.attached, self.drawn = [], [], []
        self.set_system(system)

    @property
    def system(self) -> str | None:
        """The system prompt, if there is one."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def set_system(self, text: str | None) -> None:
        """Begin with another system prompt, or with none."""
        if self.system is not None:
            del self.messages[0]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    # On a disk --------------------------------------------------------------------------------

    def as_bytes(self) -> bytes:
        """What a later process goes on from, beside the tokens."""
        content: dict[str, Any] = {
            "format": _FORMAT, "messages": self.messages, "attached": self.attached,
            "text": self._text, "marks": self._marks, "max_tokens": self.max_tokens,
        }  # fmt: skip
        if self.drawn:
            content["format"] = _WITH_PICTURES
            content["drawn"] = [
                [each.kind, each.text, each.tokens, each.visual.digest] for each in self.drawn
            ]
        return json.dumps(content).encode()

    def load(self, raw: bytes, tokens: TokenIds) -> None:
        """Become the history of `as_bytes`.

        Raises:
            DocumentDamagedError: it makes no sense.
        """
        try:
            stored = json.loads(raw)
            messages, attached = stored["messages"], stored["attached"]
            text, marks = stored["text"], [(size, count) for size, count in stored["marks"]]
            drawn = [
                Drawn(kind, said, count, Visual(start=0, end=count, digest=digest))
                for kind, said, count, digest in stored.get("drawn", [])
            ]
            right = (
                stored["format"] in (_FORMAT, _WITH_PICTURES)
                and all(type(each["role"]) is str for each in messages)
                and all(_is_content(each["content"]) for each in messages)
                and all(each.kind in KINDS and type(each.text) is str for each in drawn)
                and all(type(each.tokens) is int and each.tokens > 0 for each in drawn)
                and all(type(each) is str for each in attached)
                and type(text) is str and type(stored["max_tokens"]) is int
                and len(tokens) <= stored["max_tokens"]
                and all(type(size) is type(count) is int for size, count in marks)
                and all(0 < size <= len(text) and 0 < count <= len(tokens) for size, count in marks)
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            right = False
        if not right:
            raise DocumentDamagedError(
                "what the document says of its chat makes no sense; restore it, or begin anew",
                what=CHAT,
            )
        self.messages, self.attached = messages, attached
        self.max_tokens = stored["max_tokens"]
        self.tokens, self._text, self._marks, self.drawn = tokens, text, marks, drawn


def shared_beginning(first: TokenIds, second: TokenIds) -> int:
    """How many tokens two rows begin with both, no picture cut."""
    return common_beginning(first, first.visuals, second, second.visuals)


def _is_content(content: Any) -> bool:
    """Whether it is a text, or parts of which one is."""
    if type(content) is str:
        return True
    return type(content) is list and all(
        type(part) is dict and part.get("type") in (*KINDS, "text")
        and type(part.get("text", "")) is str for part in content
    )  # fmt: skip
