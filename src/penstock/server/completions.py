"""/v1/completions: plain prompts, without a chat template."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from penstock.server.answer_format import Piece
from penstock.server.answering import Answering, Step, Whole
from penstock.server.asking import Asked, asked_of, sampling_of
from penstock.server.backend import Backend
from penstock.server.bodies import COMPLETION_REFUSED, CompletionBody, refuse
from penstock.server.errors import as_api_error, refused
from penstock.server.replies import (
    completion_logprobs,
    new_id,
    progress_of,
    stats_of,
    timings_of,
    usage_of,
)
from penstock.server.sse import DONE, EventStream, frame


def completion_routes(backend: Backend) -> APIRouter:
    """The route of a backend."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def complete(body: CompletionBody, http: HttpRequest) -> Response:
        """Go on with one prompt or several, as OpenAI's completions do."""
        refuse(body, COMPLETION_REFUSED)
        backend.check_model(body.model)
        asked = await asyncio.to_thread(_asked, backend, body)
        answering = await Answering.begin(backend, asked)
        reply = _Reply(backend, body, answering)
        if body.stream:
            return EventStream(reply.frames(), answering.cancel)
        return JSONResponse(reply.whole(await answering.whole(http)))

    return router


class _PlainReader:
    """Every text is text."""

    def push(self, text: str) -> list[Piece]:
        """The same."""
        return [Piece("text", text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []


def _asked(backend: Backend, body: CompletionBody) -> list[Asked]:
    given = body.prompt
    prompts: list[Any] = [given]
    if isinstance(given, list) and given and not isinstance(given[0], int):
        prompts = given
    count = len(prompts) * (body.n or 1)
    if count > backend.settings.max_prompts:
        raise refused(f"{count} answers are more than {backend.settings.max_prompts}", "prompt")
    sampling = sampling_of(
        backend, body, max_tokens=body.max_tokens, n=body.n, logprobs=body.logprobs
    )
    asked: list[Asked] = []
    try:
        asked.extend(asked_of(backend, each, sampling, body, _PlainReader) for each in prompts)
    except BaseException:
        for each in asked:
            each.release()
        raise
    return asked


class _Reply:
    """One reply in the making."""

    def __init__(self, backend: Backend, body: CompletionBody, answering: Answering) -> None:
        self._backend, self._body, self._answering = backend, body, answering
        self._head = {
            "id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()),
            "model": backend.settings.model_name, "system_fingerprint": None,
        }  # fmt: skip
        self._begin: dict[int, int] = {}
        """Characters of each answer so far."""

    def whole(self, answers: list[Whole]) -> dict[str, Any]:
        """The reply without a stream."""
        choices = [
            {
                "index": index, "text": answer.text, "finish_reason": answer.finish_reason,
                "logprobs": None if answer.logprobs is None
                else completion_logprobs(answer.logprobs, 0),
                "stop_reason": answer.output.stop_reason if answer.output is not None else None,
            }
            for index, answer in enumerate(answers)
        ]  # fmt: skip
        return {**self._head, "choices": choices, **self._end(usage=True)}

    async def frames(self) -> AsyncIterator[bytes]:
        """The reply as a stream."""
        try:
            async for data in self._answering.frames(self._step):
                yield data
        except Exception as error:
            yield frame(as_api_error(error, self._backend.names).body())
            return
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        yield frame({**self._head, "choices": [], **self._end(usage=usage)})
        yield DONE

    def _step(self, step: Step) -> list[bytes]:
        if step.progress is not None and self._body.return_progress:
            choice = {"index": step.index, "text": "", "logprobs": None, "finish_reason": None}
            more = {"prompt_progress": progress_of(step.progress)}
            return [frame({**self._head, "choices": [choice], **more})]
        token = step.token
        if token is None or not (token.text or token.logprobs or token.finish_reason):
            return []
        begin = self._begin.get(step.index, 0)
        self._begin[step.index] = begin + len(token.text)
        answer = self._answering.answers[step.index]
        choice = {
            "index": step.index, "text": token.text,
            "logprobs": None if token.logprobs is None
            else completion_logprobs(token.logprobs, begin),
            "finish_reason": None if token.finish_reason is None else answer.finish_reason,
        }  # fmt: skip
        return [frame({**self._head, "choices": [choice]})]

    def _end(self, *, usage: bool) -> dict[str, Any]:
        ends = self._answering.finished
        more: dict[str, Any] = {}
        if usage:
            more["usage"] = usage_of(*(each.usage for each in ends))
        if len(ends) == 1:
            more["timings"] = timings_of(ends[0])
            if self._body.return_stats:
                more["penstock"] = stats_of(ends[0])
        return more
