"""Server-sent events: frames, and a response that says when it is over, however it ends."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def frame(data: Any, event: str | None = None) -> bytes:
    """One event; data becomes JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {text}\n\n".encode(errors="replace")


class EventStream(StreamingResponse):
    """Frames as they come. Where the client goes, what makes them is cancelled."""

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare the response.

        Args:
            on_end: called when it is over: sent, or cut off, even before the first frame.
        """
        super().__init__(frames, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
