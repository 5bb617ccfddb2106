"""What a body asks for, as requests to the engine: settings, prompt, document, reader."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.generation.chat_template import (
    ChatTemplate,
    has_chat_template,
    media_of,
    template_owner,
)
from penstock.generation.prompts import TextWithMedia, TokenIds, encode, visuals_in
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.request import Request
from penstock.models.processing import placeholder
from penstock.server.answer_format import AnswerReader
from penstock.server.backend import Backend
from penstock.server.bodies import ChatBody, Message, Sampling, Stored, Tool
from penstock.server.errors import ApiError, refused

ATTENDED_PARTS = 96
"""Of the strip that says where an answer looked."""
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "min_tokens",
)  # fmt: skip
_IMAGES = ("image_url", "input_image", "image")
_IMAGE_HEAD = "data:image/"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to be answered, whichever API it came by."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates read them."""
    tools: Sequence[Mapping[str, Any]] = ()
    """As OpenAI's chats have them."""
    must_call: bool = False
    """Whether the answer is a call of one of the tools."""
    schema: Any = None
    """A JSON schema that the answer follows."""
    sampling: SamplingParams
    stored: Stored
    variables: Mapping[str, Any]
    """Of the chat template."""
    attended_parts: int = 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to the engine, and how its answer is read."""

    request: Request
    reader: Callable[[], AnswerReader]
    """Makes one for each answer."""
    release: Callable[[], None]
    """Called when the request is over: lets its document go."""


def sampling_of(
    backend: Backend, body: Sampling, *, max_tokens: int | None, n: int | None = None,
    logprobs: int | None = None,
) -> SamplingParams:  # fmt: skip
    """Sampling settings; what is not said is as the model's own generation config has it.

    Raises:
        ConfigError: one is out of its range.
        ApiError: a field is no number of a token.
    """
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    answers = 1 if n is None else n
    if answers > backend.settings.max_prompts:
        raise refused(f"n={answers} is more than {backend.settings.max_prompts}", "n")
    if body.logit_bias:
        try:
            given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError as error:
            raise refused("logit_bias is numbers by token id", "logit_bias") from error
    default = backend.engine.llm.get_default_sampling_params()
    if max_tokens is None:
        max_tokens = backend.settings.max_answer_tokens
    return replace(
        default, max_tokens=max_tokens, n=answers, logprobs=logprobs, stop=body.stop or None,
        **given,
    )  # fmt: skip


def chat_of(backend: Backend, body: ChatBody) -> Chat:
    """The conversation of an OpenAI chat.

    Raises:
        ApiError, ConfigError: a field says what cannot be done.
    """
    tools, must_call = tools_of(body.tools or [], body.tool_choice)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens or body.max_tokens
    return Chat(
        messages=[message_of(each) for each in body.messages], tools=tools, must_call=must_call,
        schema=_schema(body),
        sampling=sampling_of(backend, body, max_tokens=most, n=body.n, logprobs=logprobs),
        stored=body, variables=body.chat_template_kwargs or {},
        attended_parts=ATTENDED_PARTS if body.return_stats else 0,
    )  # fmt: skip


def message_of(message: Message) -> dict[str, Any]:
    """A message as chat templates read it; `developer` is `system`."""
    plain = message.model_dump(exclude_none=True)
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    return {**plain, "role": role}


def tools_of(
    given: Sequence[Tool], choice: str | Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], bool]:
    """The functions among the tools that may be called, and whether one must be.

    Raises:
        ApiError: the choice is none.
    """
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": each.function.model_dump(exclude_none=True)}
        for each in given
        if each.type == "function" and each.function is not None
    ]
    name = None
    if isinstance(choice, Mapping):
        said = choice.get("function") or choice
        name = said.get("name") if isinstance(said, Mapping) else None
        if choice.get("type") not in ("function", "tool") or not isinstance(name, str):
            raise refused("tool_choice is none, auto, required, or a function by name",
                          "tool_choice")  # fmt: skip
    elif choice not in (None, "none", "auto", "required"):
        raise refused("tool_choice is none, auto, required, or a function by name", "tool_choice")
    if choice == "none":
        return [], False
    if name is not None:
        tools = [each for each in tools if each["function"]["name"] == name]
    must_call = name is not None or choice == "required"
    if must_call and not tools:
        raise refused("tool_choice asks for a call, and there is no such tool", "tool_choice")
    return tools, must_call


def ask_chat(backend: Backend, chat: Chat) -> Asked:
    """A conversation as a request. Blocks: it renders, encodes and opens a document.

    Raises:
        ApiError, PenstockError: it cannot be asked.
    """
    format_, loaded = backend.format, backend.loaded
    messages = _joined(_checked(backend, chat.messages))
    messages, tools = format_.prepared(messages, chat.tools)
    owner = template_owner(loaded)
    if has_chat_template(owner):
        template = ChatTemplate(tools=tools, kwargs=chat.variables)
        text = template.render(owner, messages)
    else:
        text = "\n".join(_text(each) for each in messages)
    media = media_of(messages)
    if media:
        placeholder(loaded, media[0].kind)  # or the model takes none
    ids = encode(loaded, TextWithMedia.of(text, media), alone=not has_chat_template(owner))
    sampling = chat.sampling
    if chat.tools and format_.keeps_special:
        sampling = replace(sampling, skip_special_tokens=False)
    held = _held(backend, chat, text)
    if held:
        sampling = replace(sampling, logits_processors=held)
    return asked_of(
        backend, TokenIds(ids, text, visuals_in(ids)), sampling, chat.stored,
        reader=lambda: format_.reader(text, has_tools=bool(chat.tools)),
        attended_parts=chat.attended_parts,
    )  # fmt: skip


def asked_of(
    backend: Backend, prompt: Any, sampling: SamplingParams, stored: Stored,
    reader: Callable[[], AnswerReader], attended_parts: int = 0,
) -> Asked:  # fmt: skip
    """A request with its document, if it names one.

    Raises:
        ApiError: there is no such document.
        DocumentError, DocumentMismatchError: it cannot be read.
    """
    lease, salt = None, stored.cache_salt or ""
    name = stored.document or stored.prompt_cache_key
    if name and backend.shelf is not None and backend.shelf.has(name, salt):
        lease = backend.shelf.lease(name, salt)
    elif stored.document:
        raise ApiError(404, f"there is no document {stored.document!r}", param="document",
                       code="document_not_found")  # fmt: skip
    document = None if lease is None else lease.document
    return Asked(
        request=Request(prompt=prompt, sampling=sampling, document=document, cache_salt=salt,
                        attended_parts=attended_parts),
        reader=reader, release=_nothing if lease is None else lease.release,
    )  # fmt: skip


def _nothing() -> None:
    pass


def _held(backend: Backend, chat: Chat, prompt: str) -> list[Any]:
    """What holds the answer to a form, if anything does.

    Raises:
        ApiError: a schema cannot be held to, or calls of this model cannot.
    """
    if not chat.must_call and chat.schema is None:
        return []
    style = backend.format.style
    if chat.tools and style != "json":
        said = f"this model writes its calls in a form ({style}) that answers cannot be held to; "
        if chat.must_call:
            raise refused(f"{said}tool_choice can be auto or none", "tool_choice")
        raise refused(f"{said}with response_format, tool_choice is none", "response_format")
    grammar = backend.grammars.of(
        schema=None if chat.must_call else chat.schema, tools=chat.tools,
        thoughts=backend.format.thoughts(prompt),
    )  # fmt: skip
    return [grammar]


def _schema(body: ChatBody) -> Any:
    said = body.response_format
    if said is None or said.type == "text":
        return None
    if said.type == "json_object":
        return {"type": "object"}
    if said.json_schema is None or said.json_schema.schema_ is None:
        raise refused("response_format of type json_schema needs json_schema.schema",
                      "response_format")  # fmt: skip
    return said.json_schema.schema_


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose first system messages are one: many templates take no second."""
    first = 0
    while first < len(messages) and messages[first].get("role") == "system":
        first += 1
    if first < 2:
        return list(messages)
    text = "\n\n".join(_text(each) for each in messages[:first])
    return [{"role": "system", "content": text}, *messages[first:]]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(each.get("text") or "") for each in content)


def _checked(backend: Backend, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose pictures came with them; nothing is fetched, and no file is read."""
    images, found = 0, []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or not content:
            found.append(message)
            continue
        parts = []
        for part in content:
            kind = part.get("type")
            if kind in _IMAGES:
                images += 1
                parts.append({"type": "image", "image": _image(part)})
            elif kind in ("text", "input_text", "output_text", "refusal"):
                parts.append({"type": "text", "text": str(part.get("text") or "")})
            else:
                raise refused(f"a content holds a part of type {str(kind)[:40]!r}; only text and "
                              "pictures work", "messages")  # fmt: skip
        if all(each["type"] == "text" for each in parts):
            found.append({**message, "content": "\n".join(each["text"] for each in parts)})
        else:
            found.append({**message, "content": parts})
    if images > backend.settings.max_images:
        raise refused(f"{images} pictures are more than {backend.settings.max_images}", "messages")
    return found


def _image(part: Mapping[str, Any]) -> str:
    source = next((part[name] for name in _IMAGES if part.get(name) is not None), None)
    if isinstance(source, Mapping):
        source = source.get("url")
    head, _, data = source.partition(",") if isinstance(source, str) else ("", "", "")
    if not (head.startswith(_IMAGE_HEAD) and head.endswith(";base64")):
        raise refused(
            "a picture comes as a data URL (data:image/png;base64,...); nothing is fetched",
            "messages",
        )
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused("a picture's data URL is not base64", "messages") from error
    return str(source)
