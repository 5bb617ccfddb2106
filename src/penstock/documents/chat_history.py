"""ChatHistory: the messages of a chat, and the tokens that a cache holds of them."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import DocumentDamagedError
from penstock.generation.chat_template import ChatTemplate, Message
from penstock.generation.prompts import encode
from penstock.models.loader import LoadedModel

CHAT = "chat"
"""Blob of a document that is a chat: what `ChatHistory.as_bytes` gives."""
_FORMAT = 1
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
        max_tokens: most that the chat was begun for
    """

    def __init__(self, loaded: LoadedModel, template: ChatTemplate, max_tokens: int) -> None:
        self._loaded, self._template = loaded, template
        self.messages: list[dict[str, Any]] = []
        self.attached: list[str] = []
        self.tokens: list[int] = []
        self.max_tokens = max_tokens
        self._text = ""
        self._marks: list[tuple[int, int]] = []
        """So many first characters of the text are so many first tokens; ascending."""

    def message_of(self, text: str) -> dict[str, Any]:
        """The next message of the user, with what is attached in front."""
        return {"role": "user", "content": "\n\n".join([*self.attached, text])}

    def render(self, message: Message) -> tuple[str, list[int]]:
        """The prompt for the next turn, as text and as tokens.

        Raises:
            PromptError, ConfigError: as for `ChatTemplate.render`.
        """
        text = self._template.render(self._loaded.tokenizer, [*self.messages, message])
        ids = encode(self._loaded, text, what="the conversation", alone=False)
        if ids[: len(self.tokens)] == self.tokens:
            return text, ids
        for size, count in reversed(self._marks):
            if text.startswith(self._text[:size]):
                rest = encode(self._loaded, text[size:], alone=False)
                if rest and ids[-len(rest) :] == rest:  # no token lies across the border
                    return text, self.tokens[:count] + rest
        return text, ids

    def render_beginning(self) -> list[int]:
        """Tokens of the prompt as far as what is attached decides them, whatever is said then."""
        first, second = (self.render(self.message_of(word))[1] for word in _NEXT_WORDS)
        return first[: common_beginning(first, second)]

    def answered(
        self, message: Message, answer: str, prompt: str, ids: list[int], new: list[int]
    ) -> None:
        """Take a turn in.

        Args:
            answer: the text of the answer.
            prompt: that was rendered for it.
            ids: tokens of the prompt.
            new: tokens of the answer, without the one that ended it.
        """
        self.messages += [dict(message), {"role": "assistant", "content": answer}]
        self.attached = []
        self.tokens = [*ids, *new]
        tokenizer: Any = self._loaded.tokenizer
        said = tokenizer.decode(new, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._text, self._marks = prompt + answer, [(len(prompt), len(ids))]
        if said == answer:  # not where a stop string or a special token was not shown
            self._marks.append((len(self._text), len(self.tokens)))

    def holds(self, tokens: Sequence[int]) -> None:
        """The cache has these tokens now, whatever became of a turn."""
        same = common_beginning(self.tokens, tokens)
        self._marks = [(size, count) for size, count in self._marks if count <= same]
        self.tokens = list(tokens)

    def clear(self) -> None:
        """Forget all but the system prompt."""
        system = self.system
        self.messages, self.attached = [], []
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
        return json.dumps(
            {
                "format": _FORMAT, "messages": self.messages, "attached": self.attached,
                "text": self._text, "marks": self._marks, "max_tokens": self.max_tokens,
            }
        ).encode()  # fmt: skip

    def load(self, raw: bytes, tokens: Sequence[int]) -> None:
        """Become the history of `as_bytes`.

        Raises:
            DocumentDamagedError: it makes no sense.
        """
        try:
            stored = json.loads(raw)
            messages, attached = stored["messages"], stored["attached"]
            text, marks = stored["text"], [(size, count) for size, count in stored["marks"]]
            right = (
                stored["format"] == _FORMAT
                and all(type(each["role"]) is type(each["content"]) is str for each in messages)
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
        self.tokens, self._text, self._marks = list(tokens), text, marks


def common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two rows begin with both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
