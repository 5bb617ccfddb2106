"""/v1/messages: Anthropic's API."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from penstock.generation.serving.events import Finished
from penstock.server.answering import Answering, Step, Whole
from penstock.server.asking import Chat, ask_chat, sampling_of, tools_of
from penstock.server.backend import Backend
from penstock.server.bodies import Body, Sampling, Stored, Tool, refuse
from penstock.server.errors import as_api_error, refused
from penstock.server.replies import new_id
from penstock.server.sse import EventStream, frame

_REFUSED = {"mcp_servers": "tools are functions alone", "container": "no code is run here"}


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessagesBody(Sampling, Stored):
    """Of /v1/messages."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = Field(default=None, max_length=32)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountBody(Body):
    """Of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def messages_routes(backend: Backend) -> APIRouter:
    """The routes of a backend."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def message(body: MessagesBody, http: HttpRequest) -> Response:
        """Answer a conversation, as Anthropic's Messages do."""
        refuse(body, _REFUSED)
        backend.check_model(body.model)
        answering = await Answering.of_chat(backend, lambda: _chat(backend, body))
        reply = _Reply(backend, answering)
        if body.stream:
            return EventStream(reply.frames(), answering.cancel)
        [answer] = await answering.whole(http)
        return JSONResponse(reply.whole(answer))

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountBody) -> dict[str, int]:
        """Tokens of a prompt."""
        backend.check_model(body.model)
        whole = MessagesBody.model_validate({**body.model_dump(exclude_none=True), "max_tokens": 1})

        asked = await asyncio.to_thread(lambda: ask_chat(backend, _chat(backend, whole)))
        prompt: Any = asked.request.prompt
        asked.release()
        return {"input_tokens": len(prompt)}

    return router


# What is asked --------------------------------------------------------------------------------


def _chat(backend: Backend, body: MessagesBody) -> Chat:
    functions = [
        Tool.model_validate({"type": "function", "function": _function(each)})
        for each in body.tools or ()
        if isinstance(each.get("name"), str) and isinstance(each.get("input_schema"), Mapping)
    ]
    said = body.tool_choice or {}
    choice: Any = {"auto": "auto", "none": "none", "any": "required"}.get(str(said.get("type")))
    if said and choice is None:
        choice = {"type": said.get("type"), "name": said.get("name")}
    tools, must_call = tools_of(functions, choice)
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _plain(body.system)})
    for each in body.messages:
        messages += _messages(each)
    body.stop = body.stop_sequences
    return Chat(
        messages=messages, tools=tools, must_call=must_call,
        sampling=sampling_of(backend, body, max_tokens=body.max_tokens),
        stored=body, variables=body.chat_template_kwargs or {},
    )  # fmt: skip


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    description = tool.get("description")
    said = {"name": tool["name"], "parameters": tool["input_schema"]}
    return said if description is None else {**said, "description": str(description)}


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as those of OpenAI's chats: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": str(block.get("text") or "")})
            case "image":
                parts.append({"type": "image_url", "image_url": _image(block)})
            case "tool_use":
                function = {
                    "name": block.get("name"), "arguments": json.dumps(block.get("input") or {}),
                }  # fmt: skip
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                results.append({
                    "role": "tool", "tool_call_id": block.get("tool_use_id"),
                    "content": _plain(block.get("content") or ""),
                })  # fmt: skip
            case "thinking" | "redacted_thinking":
                pass
            case kind:
                raise refused(f"a content holds a block of type {str(kind)[:40]!r}", "messages")
    if not (parts or calls):
        return results
    said: dict[str, Any] = {"role": message.role, "content": parts}
    if calls:
        said["tool_calls"] = calls
    return [*results, said]


def _image(block: Mapping[str, Any]) -> str:
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise refused("a picture comes as base64; nothing is fetched", "messages")
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(each.get("text") or "") for each in parts if isinstance(each, Mapping))


# What is answered -----------------------------------------------------------------------------


class _Reply:
    """One reply in the making."""

    def __init__(self, backend: Backend, answering: Answering) -> None:
        self._backend, self._answering = backend, answering
        self._head = {
            "id": new_id("msg_"), "type": "message", "role": "assistant",
            "model": backend.settings.model_name,
        }  # fmt: skip
        self._index = -1
        self._kind: str | None = None

    def whole(self, answer: Whole) -> dict[str, Any]:
        """The reply without a stream."""
        [end] = self._answering.finished
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in answer.calls
        ]
        return {**self._head, "content": content, **_stop(answer), "usage": _usage(end)}

    async def frames(self) -> AsyncIterator[bytes]:
        """The reply as a stream."""
        nothing = {"input_tokens": 0, "output_tokens": 0}
        begun: dict[str, Any] = {
            **self._head, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": nothing,
        }  # fmt: skip
        yield _event("message_start", message=begun)
        try:
            async for data in self._answering.frames(self._step):
                yield data
        except Exception as error:
            said = as_api_error(error, self._backend.names)
            yield frame(said.body(anthropic=True), "error")

    def _step(self, step: Step) -> list[bytes]:
        found: list[bytes] = []
        for piece in step.pieces:
            if piece.call is not None:
                block = {"type": "tool_use", "id": piece.call.id, "name": piece.call.name,
                         "input": {}}  # fmt: skip
                delta = {"type": "input_json_delta", "partial_json": piece.call.arguments}
                found += [*self._begin("tool_use", block), self._delta(delta), *self._close()]
            elif piece.kind == "reasoning":
                if self._kind != "thinking":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    found += self._begin("thinking", block)
                found.append(self._delta({"type": "thinking_delta", "thinking": piece.text}))
            else:
                if self._kind != "text":
                    found += self._begin("text", {"type": "text", "text": ""})
                found.append(self._delta({"type": "text_delta", "text": piece.text}))
        if step.finished is not None:
            if self._index < 0:
                found += self._begin("text", {"type": "text", "text": ""})
            found += self._close()
            answer = self._answering.answers.get(0, Whole())
            found.append(_event("message_delta", delta=_stop(answer), usage=_usage(step.finished)))
            found.append(_event("message_stop"))
        return found

    def _begin(self, kind: str, block: Mapping[str, Any]) -> list[bytes]:
        found = self._close()
        self._index, self._kind = self._index + 1, kind
        return [*found, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        self._kind = None
        return [_event("content_block_stop", index=self._index)]


def _event(name: str, /, **data: Any) -> bytes:
    return frame({"type": name, **data}, name)


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"arguments": arguments}


def _stop(answer: Whole) -> dict[str, Any]:
    met = answer.output.stop_reason if answer.output is not None else None
    if answer.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(met, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(end: Finished) -> dict[str, int]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens, "cache_creation_input_tokens": 0,
        "output_tokens": usage.new_tokens,
    }  # fmt: skip
