"""/v1/chat/completions."""

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from penstock.generation.serving.events import Finished
from penstock.server.answering import Answering, Step, Whole, call_of
from penstock.server.asking import chat_of
from penstock.server.backend import Backend
from penstock.server.bodies import CHAT_REFUSED, ChatBody, refuse
from penstock.server.errors import as_api_error
from penstock.server.replies import (
    chat_logprobs,
    new_id,
    progress_of,
    stats_of,
    timings_of,
    usage_of,
)
from penstock.server.sse import DONE, EventStream, frame


def chat_routes(backend: Backend) -> APIRouter:
    """The route of a backend."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation, as OpenAI's chat completions do."""
        refuse(body, CHAT_REFUSED)
        backend.check_model(body.model)
        answering = await Answering.of_chat(backend, lambda: chat_of(backend, body))
        reply = _Reply(backend, body, answering)
        if body.stream:
            return EventStream(reply.frames(), answering.cancel)
        return JSONResponse(reply.whole(await answering.whole(http)))

    return router


class _Reply:
    """One reply in the making."""

    def __init__(self, backend: Backend, body: ChatBody, answering: Answering) -> None:
        self._backend, self._body, self._answering = backend, body, answering
        self._head = {
            "id": new_id("chatcmpl-"), "created": int(time.time()),
            "model": backend.settings.model_name, "system_fingerprint": None,
        }  # fmt: skip
        self._top = body.top_logprobs or 0
        self._calls: dict[int, int] = {}
        self._over: list[tuple[int, dict[str, Any], str]] = []

    def whole(self, answers: list[Whole]) -> dict[str, Any]:
        """The reply without a stream."""
        [end] = self._answering.finished
        choices = [
            {
                "index": index, "message": self._message(answer),
                "logprobs": None if answer.logprobs is None
                else chat_logprobs(answer.logprobs, self._top),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.output.stop_reason if answer.output is not None else None,
            }
            for index, answer in enumerate(answers)
        ]  # fmt: skip
        reply = {
            **self._head, "object": "chat.completion", "choices": choices,
            "usage": usage_of(end.usage), "timings": timings_of(end),
        }  # fmt: skip
        if self._body.return_stats:
            reply["penstock"] = stats_of(end)
        return reply

    @staticmethod
    def _message(answer: Whole) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            said["content"] = answer.text or None
            said["tool_calls"] = [call_of(call) for call in answer.calls]
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning.strip("\n")
        return said

    async def frames(self) -> AsyncIterator[bytes]:
        """The reply as a stream."""
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        try:
            async for data in self._answering.frames(self._step):
                yield data
        except Exception as error:
            yield frame(as_api_error(error, self._backend.names).body())
            return
        yield DONE

    def _step(self, step: Step) -> list[bytes]:
        found = []
        if step.progress is not None and self._body.return_progress:
            found.append(self._chunk(0, {}, prompt_progress=progress_of(step.progress)))
        for piece in step.pieces:
            if piece.call is not None:
                number = self._calls[step.index] = self._calls.get(step.index, -1) + 1
                delta: dict[str, Any] = {"tool_calls": [call_of(piece.call, number)]}
            elif piece.kind == "reasoning":
                delta = {"reasoning_content": piece.text}
            else:
                delta = {"content": piece.text}
            found.append(self._chunk(step.index, delta))
        token = step.token
        if token is not None and token.logprobs is not None:
            # With the text of its token, unless that is held back.
            logprobs = chat_logprobs(token.logprobs, self._top)
            found.append(self._chunk(step.index, {"content": ""}, logprobs=logprobs))
        if token is not None and token.finish_reason is not None:
            # The last one waits for what the end of the request brings.
            found += [self._chunk(*each) for each in self._over]
            reason = self._answering.answers[step.index].finish_reason
            self._over = [(step.index, {}, reason)]
        if step.finished is not None:
            found += self._end(step.finished)
        return found

    def _end(self, end: Finished) -> list[bytes]:
        more: dict[str, Any] = {"timings": timings_of(end)}
        if self._body.return_stats:
            more["penstock"] = stats_of(end)
        found = [self._chunk(*each, **more) for each in self._over]
        options = self._body.stream_options
        if options is not None and options.include_usage:
            last = {"choices": [], "usage": usage_of(end.usage)}
            found.append(frame({**self._head, "object": "chat.completion.chunk", **last}))
        return found

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, *,
        logprobs: Any = None, **more: Any,
    ) -> bytes:  # fmt: skip
        choice = {
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
        }  # fmt: skip
        return frame({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})
