"""/v1/responses: OpenAI's newer API, as agents such as Codex speak it."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from penstock.generation.serving.events import Finished
from penstock.server.answer_format import Call
from penstock.server.answering import Answering, Step, Whole
from penstock.server.asking import Chat, sampling_of, tools_of
from penstock.server.backend import Backend
from penstock.server.bodies import RESPONSES_REFUSED, Sampling, Stored, Tool, refuse
from penstock.server.errors import as_api_error, refused
from penstock.server.replies import new_id
from penstock.server.sse import EventStream, frame


class ResponsesBody(Sampling, Stored):
    """Of /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    store: bool | None = None
    """Responses are not kept, whatever it says."""
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def responses_routes(backend: Backend) -> APIRouter:
    """The route of a backend."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def respond(body: ResponsesBody, http: HttpRequest) -> Response:
        """Answer an input; tools that are no functions are left out."""
        refuse(body, RESPONSES_REFUSED)
        backend.check_model(body.model)
        answering = await Answering.of_chat(backend, lambda: _chat(backend, body))
        reply = _Reply(backend, body, answering)
        if body.stream:
            return EventStream(reply.frames(), answering.cancel)
        [answer] = await answering.whole(http)
        return JSONResponse(reply.whole(answer))

    return router


# What is asked --------------------------------------------------------------------------------


def _chat(backend: Backend, body: ResponsesBody) -> Chat:
    functions = [
        Tool.model_validate({"type": "function", "function": _function(each)})
        for each in body.tools or ()
        if each.get("type") == "function" and isinstance(each.get("name"), str)
    ]
    choice = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice = str(choice.get("mode", "auto"))
    tools, must_call = tools_of(functions, choice)
    messages = _messages(body.input)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not any(each["role"] != "system" for each in messages):
        messages.append({"role": "user", "content": ""})  # a probe: is anyone there?
    return Chat(
        messages=messages, tools=tools, must_call=must_call, schema=_schema(body),
        sampling=sampling_of(backend, body, max_tokens=body.max_output_tokens),
        stored=body, variables=body.chat_template_kwargs or {},
    )  # fmt: skip


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {name: tool[name] for name in names if tool.get(name) is not None}


def _schema(body: ResponsesBody) -> Any:
    said = (body.text or {}).get("format") or {}
    kind = said.get("type", "text") if isinstance(said, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(said.get("schema"), Mapping):
        return said["schema"]
    raise refused("text.format is text, json_object, or json_schema with a schema", "text.format")


def _messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items of an input as messages; calls that follow each other are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    found: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            if role not in ("system", "user", "assistant"):
                raise refused("an item of the input is a message without a role", "input")
            content = item.get("content")
            if not isinstance(content, str | list):
                raise refused("a message of the input has no content", "input")
            found.append({"role": role, "content": content})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }  # fmt: skip
            if found and found[-1].get("tool_calls"):
                found[-1]["tool_calls"].append(call)
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            said = output if isinstance(output, str | list) else json.dumps(output)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        elif kind != "reasoning":  # whose words are the model's own affair
            raise refused(f"an item of the input is of type {str(kind)[:40]!r}", "input")
    return found


# What is answered -----------------------------------------------------------------------------


class _Reply:
    """One reply in the making."""

    def __init__(self, backend: Backend, body: ResponsesBody, answering: Answering) -> None:
        self._backend, self._body, self._answering = backend, body, answering
        self._head = {
            "id": new_id("resp_"), "object": "response", "created_at": int(time.time()),
            "model": backend.settings.model_name, "instructions": body.instructions,
            "tools": body.tools or [], "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": True, "store": False, "metadata": {}, "error": None,
            "temperature": body.temperature, "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens, "previous_response_id": None,
            "text": body.text or {"format": {"type": "text"}},
        }  # fmt: skip
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def whole(self, answer: Whole) -> dict[str, Any]:
        """The reply without a stream."""
        [end] = self._answering.finished
        items: list[dict[str, Any]] = []
        if answer.reasoning:
            items.append(_reasoning(answer.reasoning))
        if answer.text or not answer.calls:
            items.append(_message(answer.text))
        items += [_called(call) for call in answer.calls]
        return self._ended(end, items, answer)

    def _ended(
        self, end: Finished, items: Sequence[Mapping[str, Any]], answer: Whole
    ) -> dict[str, Any]:
        usage, is_short = end.usage, answer.reason == "length"
        return {
            **self._head, "status": "incomplete" if is_short else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_short else None,
            "output": list(items),
            "usage": {
                "input_tokens": usage.prompt_tokens, "output_tokens": usage.new_tokens,
                "total_tokens": usage.prompt_tokens + usage.new_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }  # fmt: skip

    async def frames(self) -> AsyncIterator[bytes]:
        """The reply as a stream."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        try:
            async for data in self._answering.frames(self._step):
                yield data
        except Exception as error:
            said = as_api_error(error, self._backend.names)
            about = {"code": said.code or "server_error", "message": said.message}
            failed = {**begun, "status": "failed", "error": about}
            yield self._event("response.failed", response=failed)

    def _step(self, step: Step) -> list[bytes]:
        found: list[bytes] = []
        for piece in step.pieces:
            if piece.call is not None:
                found += [*self._close(), *self._call(piece.call)]
                continue
            kind = "message" if piece.kind == "text" else "reasoning"
            if self._open is None or self._open["type"] != kind:
                found += [*self._close(), *self._begin(kind)]
            found.append(self._delta(piece.text))
        if step.finished is not None:
            if self._open is None and not self._items:
                found += self._begin("message")
            found += self._close()
            answer = self._answering.answers.get(0, Whole())
            ended = self._ended(step.finished, self._items, answer)
            name = f"response.{ended['status']}"
            found.append(self._event(name, response=ended))
        return found

    def _begin(self, kind: str) -> list[bytes]:
        item = _message("") if kind == "message" else _reasoning("")
        self._open = item
        begun = {**item, "status": "in_progress", "content": []}
        found = [self._event("response.output_item.added", output_index=len(self._items),
                             item=begun)]  # fmt: skip
        part = item["content"][0]
        found.append(self._event("response.content_part.added", **self._place(), part=dict(part)))
        return found

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"], "output_index": len(self._items), "content_index": 0,
        }  # fmt: skip

    def _delta(self, text: str) -> bytes:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        if self._open["type"] == "message":
            return self._event(
                "response.output_text.delta", **self._place(), delta=text, logprobs=[]
            )
        return self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        item, place = self._open, self._place()
        part, is_text = item["content"][0], item["type"] == "message"
        name = "response.output_text.done" if is_text else "response.reasoning_text.done"
        more: dict[str, Any] = {"logprobs": []} if is_text else {}
        found = [
            self._event(name, **place, text=part["text"], **more),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._open = None
        return found

    def _call(self, call: Call) -> list[bytes]:
        item, at = _called(call), len(self._items)
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": at}
        self._items.append(item)
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name,
                        arguments=call.arguments),
            self._event("response.output_item.done", output_index=at, item=item),
        ]  # fmt: skip

    def _event(self, name: str, /, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return frame({"type": name, "sequence_number": number, **data}, name)


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": new_id("msg_"), "type": "message", "role": "assistant", "status": "completed",
        "content": [part],
    }  # fmt: skip


def _reasoning(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {
        "id": new_id("rs_"), "type": "reasoning", "summary": [], "status": "completed",
        "content": [part],
    }  # fmt: skip


def _called(call: Call) -> dict[str, Any]:
    return {
        "id": new_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name,
        "arguments": call.arguments, "status": "completed",
    }  # fmt: skip
