"""Answering: answers to one HTTP request, read piece by piece or as a whole."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest

from penstock.generation.logprobs import LogprobsOnePosition
from penstock.generation.output import CompletionOutput, FinishReason
from penstock.generation.serving.events import Finished, Prefill, Token
from penstock.server.answer_format import AnswerReader, Call, Piece
from penstock.server.asking import Asked, Chat, ask_chat
from penstock.server.backend import Backend
from penstock.server.generating import Generation
from penstock.server.sse import KEEP_ALIVE


@dataclass(kw_only=True)
class Whole:
    """An answer that is over, taken apart."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[LogprobsOnePosition] | None = None
    output: CompletionOutput | None = None

    def take(self, pieces: Sequence[Piece]) -> None:
        """Add parts."""
        for piece in pieces:
            if piece.call is not None:
                self.calls.append(piece.call)
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            else:
                self.text += piece.text

    @property
    def reason(self) -> FinishReason:
        """Why it is over, as the engine says."""
        return (self.output.finish_reason if self.output is not None else None) or "stop"

    @property
    def finish_reason(self) -> str:
        """The same, as OpenAI's chats say."""
        if self.calls and self.reason != "length":
            return "tool_calls"
        return "length" if self.reason == "length" else "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What is new of one answer, or of a prompt."""

    index: int = 0
    """Of the answer, over all requests."""
    pieces: Sequence[Piece] = ()
    token: Token | None = None
    progress: Prefill | None = None
    finished: Finished | None = None
    """All answers of a request are over."""


class Answering:
    """Answers of requests that came together."""

    def __init__(self, backend: Backend, asked: Sequence[Asked], generation: Generation) -> None:
        """Take them over; use `begin`."""
        self._backend, self._asked, self._generation = backend, asked, generation
        self._readers: dict[int, AnswerReader] = {}
        self.answers: dict[int, Whole] = {}
        """By index; what has come so far."""

    @classmethod
    async def begin(cls, backend: Backend, asked: Sequence[Asked]) -> "Answering":
        """Submit the requests.

        Raises:
            As for `Generation.begin`.
        """
        return cls(backend, asked, await Generation.begin(backend, asked))

    @classmethod
    async def of_chat(cls, backend: Backend, chat: Callable[[], Chat]) -> "Answering":
        """Submit a conversation, which is prepared in a thread: templates and pictures take time.

        Raises:
            ApiError: it cannot be asked so.
            As for `Generation.begin`.
        """
        asked = await asyncio.to_thread(lambda: ask_chat(backend, chat()))
        return await cls.begin(backend, [asked])

    def cancel(self) -> None:
        """Give up what is not over."""
        self._generation.cancel()

    @property
    def finished(self) -> list[Finished]:
        """Ends of requests, in their order."""
        ends = self._generation.finished
        return [ends[number] for number in sorted(ends)]

    async def steps(self, tick_s: float | None = None) -> AsyncGenerator[Step | None]:
        """What happens, as it happens; None where nothing has for a while.

        Args:
            tick_s: that while; None: as streams want it.

        Raises:
            As for `Generation.events`.
        """
        tick_s = self._backend.settings.keep_alive_s if tick_s is None else tick_s
        async with aclosing(self._generation.events(tick_s)) as events:
            async for news in events:
                if news is None:
                    yield None
                    continue
                asked = self._asked[news.number]
                first = sum(each.request.sampling.n for each in self._asked[: news.number])
                match news.event:
                    case Token() as token:
                        yield self._token(asked, first + token.index, token)
                    case Prefill() as progress:
                        yield Step(index=first, progress=progress)
                    case Finished() as finished:
                        yield Step(index=first, finished=finished)

    async def frames(self, made: Callable[[Step], Sequence[bytes]]) -> AsyncGenerator[bytes]:
        """What is made of each step, and a comment where nothing happens for a while.

        Raises:
            As for `steps`.
        """
        async with aclosing(self.steps()) as steps:
            async for step in steps:
                for data in (KEEP_ALIVE,) if step is None else made(step):
                    yield data

    async def whole(self, http: HttpRequest) -> list[Whole]:
        """All answers, in the order of their index.

        Raises:
            ClientGoneError: the client has gone; the requests are cancelled.
            As for `Generation.events`.
        """
        found = []
        try:
            ends = await self._generation.whole(http)
        except asyncio.CancelledError:
            self.cancel()
            raise
        for asked, end in zip(self._asked, ends, strict=True):
            for output in end.outputs:
                reader, answer = asked.reader(), Whole(output=output, logprobs=output.logprobs)
                answer.take([*reader.push(output.text), *reader.finish()])
                found.append(answer)
        return found

    def _token(self, asked: Asked, index: int, token: Token) -> Step:
        if index not in self._readers:
            self._readers[index], self.answers[index] = asked.reader(), Whole()
        reader, answer = self._readers[index], self.answers[index]
        pieces = reader.push(token.text)
        if token.finish_reason is not None:
            pieces += reader.finish()
            answer.output = CompletionOutput(
                index=token.index, text="", token_ids=[], finish_reason=token.finish_reason,
                stop_reason=token.stop_reason,
            )  # fmt: skip
        answer.take(pieces)
        return Step(index=index, pieces=pieces, token=token)


def call_of(call: Call, index: int | None = None) -> dict[str, Any]:
    """A call in OpenAI's chats.

    Args:
        index: among the calls of the answer, in a stream.
    """
    said = {
        "id": call.id, "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }  # fmt: skip
    return said if index is None else {"index": index, **said}
