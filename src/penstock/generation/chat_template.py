"""ChatTemplate: messages to the text that a model was taught to answer, by its own template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from penstock.core.errors import ConfigError, PromptError
from penstock.core.printable import require_text
from penstock.generation.prompts import TextWithMedia
from penstock.models.loader import LoadedModel
from penstock.models.processing import Kind, Media, placeholder

Message: TypeAlias = Mapping[str, Any]
"""A role and a content: a text, or parts of type "text", "image" and "video"; and whatever else a
template reads."""
ContentFormat = Literal["auto", "string", "openai"]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field that holds it."""
_MEDIA_PARTS: Mapping[str, Kind] = {
    "image": "image", "image_url": "image", "input_image": "image", "video": "video",
    "video_url": "video",
}  # fmt: skip
"""Types of parts that are pictures, and their kind."""
_SOURCES = ("image", "video", "url", "path", "image_url", "video_url")
"""Fields of such a part that say where its pixels are, the last two a mapping with "url" too."""
_OURS = frozenset({
    "conversation", "tokenize", "return_tensors", "return_dict", "padding", "truncation",
    "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs", "chat_template", "tools",
    "add_generation_prompt", "continue_final_message",
})  # fmt: skip
"""Arguments of `apply_chat_template` that are no variables of a template."""
_PROBE = "penstock-probe"


def has_chat_template(tokenizer: object) -> bool:
    """Whether messages can be put to the model of a tokenizer."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_owner(loaded: LoadedModel) -> Any:
    """What has a model's chat template: its processor, or its tokenizer."""
    processor = loaded.processor
    return processor if has_chat_template(processor) else loaded.tokenizer


def picture_text(loaded: LoadedModel, kind: Kind) -> str:
    """What the model's chat template writes for a picture or video: its placeholder, and what
    stands around it.

    Raises:
        PromptError: the model takes none.
    """
    marker, owner = placeholder(loaded, kind), template_owner(loaded)
    if not has_chat_template(owner):
        return marker
    text = {"type": "text", "text": _PROBE}
    alone, shown = (
        ChatTemplate(content_format="openai").render(owner, [{"role": "user", "content": content}])
        for content in ([text], [{"type": kind}, text])
    )
    begin, end = alone.find(_PROBE), shown.find(_PROBE)
    found = shown[begin:end] if 0 <= begin <= end else ""
    return found if marker in found else marker


def with_media(loaded: LoadedModel, text: str, media: Sequence[Media]) -> TextWithMedia | str:
    """A text with pictures; in front of it, for the kinds that it has no placeholders of.

    Raises:
        PromptError: the model takes none.
    """
    before = ""
    for kind in dict.fromkeys(each.kind for each in media):
        if placeholder(loaded, kind) not in text:
            before += picture_text(loaded, kind) * sum(each.kind == kind for each in media)
    return TextWithMedia.of(before + text, media) if media else text


def media_of(messages: Sequence[Message]) -> list[Media]:
    """The pictures and videos in messages, in order.

    Raises:
        PromptError: a part does not say where its pixels are.
    """
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            found += [_media(part) for part in content if _is_media(part)]
    return found


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _MEDIA_PARTS


def _media(part: Mapping[str, Any]) -> Media:
    for name in _SOURCES:
        source = part.get(name)
        if isinstance(source, Mapping):
            source = source.get("url")
        if source is not None:
            return Media(_MEDIA_PARTS[part["type"]], source)
    raise PromptError(
        f"a part of type {part['type']} does not say where its pixels are; write "
        f'{{"type": "{_MEDIA_PARTS[part["type"]]}", "path": "..."}}'
    )


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Any]]:
    """A list of conversations, whether one was given or several.

    Raises:
        PromptError: there is no message, or what was given is no list of messages.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(
            f"messages are a list of {{'role': ..., 'content': ...}}, not {type(messages).__name__}"
        )
    given: list[Any] = list(messages)
    several = bool(given) and isinstance(given[0], list | tuple)
    conversations = [list(each) for each in given] if several else [given]
    for conversation in conversations:
        if not conversation:
            raise PromptError("there is no message in the conversation; give at least one")
    return conversations


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """How messages become a prompt.

    Raises:
        ConfigError: `kwargs` has what is no variable of a template.
    """

    text: str | None = None
    """A Jinja template in place of the tokenizer's own."""
    content_format: ContentFormat = "auto"
    """Whether the template gets a content as one "string", or as parts ("openai")."""
    tools: Sequence[Any] | None = None
    """JSON schemas of functions that the model may call."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        if self.content_format not in ("auto", "string", "openai"):
            raise ConfigError(
                f"chat_template_content_format={self.content_format!r} must be auto, string or "
                "openai"
            )
        for name in self.kwargs:
            if name in _OURS:
                raise ConfigError(f"chat_template_kwargs has {name}, which is not the template's")

    def render(
        self, tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:  # fmt: skip
        """The prompt of one conversation, special tokens written out, a placeholder for each
        picture (`media_of`).

        To encode it, the tokenizer must add none of its own: the template writes them.

        Args:
            add_generation_prompt: end with the beginning of the model's turn.
            continue_final_message: leave the last message open, for the model to go on with.

        Raises:
            ConfigError: there is no template, or both of the above are asked for.
            PromptError: a message has no role or another content than text and pictures, or the
                template refuses the conversation.
        """
        if add_generation_prompt and continue_final_message:
            raise ConfigError(
                "continue_final_message goes on with the last message, and add_generation_prompt "
                "begins another; ask for one of them"
            )
        if self.text is None and not has_chat_template(tokenizer):
            raise ConfigError(
                "this model has no chat template, so that it takes no messages; give plain text "
                "(LLM.generate, penstock generate --raw), or a chat_template"
            )
        plain = [_plain(message) for message in messages]
        has_parts = any(isinstance(each.get("content"), list) for each in plain)
        if has_parts or self._wants_parts(tokenizer):
            plain = [_in_parts(message) for message in plain]
        rendered = self._apply(
            tokenizer, plain, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )  # fmt: skip
        require_text(rendered, "the conversation")
        return rendered

    def _apply(self, tokenizer: Any, messages: list[dict[str, Any]], **options: bool) -> str:
        given: dict[str, Any] = {name: value for name, value in options.items() if value}
        if self.text is not None:
            given["chat_template"] = self.text
        if self.tools is not None:
            given["tools"] = list(self.tools)
        try:
            return str(
                tokenizer.apply_chat_template(messages, tokenize=False, **given, **self.kwargs)
            )
        except Exception as error:  # whatever a template's code raises
            said = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refuses the conversation: {said}") from error

    def _wants_parts(self, tokenizer: Any) -> bool:
        """Whether the template reads contents as lists of parts: those of models that also see."""
        if self.content_format != "auto":
            return self.content_format == "openai"

        def shows(content: str | list[dict[str, str]]) -> bool:
            try:
                shown = self._apply(tokenizer, [{"role": "user", "content": content}])
            except PromptError:
                return False
            return _PROBE in shown and "'type'" not in shown and '"type"' not in shown

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def _plain(message: Any) -> dict[str, Any]:
    """A message with its content as one text, or none; or as parts, where pictures are among
    them."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError("a message is {'role': ..., 'content': ...}, and this one has no role")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if any(_is_media(part) for part in content):
            plain["content"] = [
                {"type": _MEDIA_PARTS[part["type"]]} if _is_media(part)
                else {"type": "text", "text": _text_of(part)} for part in content
            ]  # fmt: skip
        else:
            plain["content"] = "\n".join(_text_of(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise PromptError(
            f"the content of a message is a {type(content).__name__}; give a text, or a list of "
            "parts"
        )
    elif content is None and not plain.get("tool_calls"):
        plain["content"] = ""
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
    return plain


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise PromptError(
            f"a message holds a part of type {kind}; only parts of type text, image and video work"
        )
    return text


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates want them; OpenAI's are JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise PromptError(f"the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
