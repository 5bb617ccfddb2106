"""/v1/documents: texts that are read once, and asked by name ever after."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from penstock.server.backend import Backend
from penstock.server.bodies import Body
from penstock.server.errors import ApiError
from penstock.server.shelf import Reading, Shelf
from penstock.server.sse import DONE, KEEP_ALIVE, EventStream, frame

_LOOK_S = 0.25
Salt = Annotated[str, Query(alias="cache_salt", max_length=1000)]


class DocumentBody(Body):
    """Of a new document."""

    name: str
    text: str = Field(min_length=1)
    title: str = Field("", max_length=1000)
    cache_salt: str | None = None
    stream: bool = False
    """Tell how far it is read, as server-sent events; else the answer comes when it is stored."""


def document_routes(backend: Backend) -> APIRouter:
    """The routes of a backend."""
    router = APIRouter()

    def shelf() -> Shelf:
        if backend.shelf is None:
            raise ApiError(501, "this server keeps no documents; start it with --library")
        return backend.shelf

    @router.post("/v1/documents")
    async def add(body: DocumentBody) -> Response:
        """Read a text and store its KV cache; goes on where the client goes."""
        salt = body.cache_salt or ""
        reading = await asyncio.to_thread(shelf().add, body.name, body.text, salt, body.title)
        if body.stream:
            return EventStream(_progress(backend, shelf(), reading, salt))
        while not reading.over.is_set():
            await asyncio.sleep(_LOOK_S)
        return JSONResponse(await asyncio.to_thread(_end, shelf(), reading, salt), 201)

    @router.get("/v1/documents")
    async def documents(salt: Salt = "") -> dict[str, Any]:
        """All documents, and those that are being read."""
        return {"object": "list", "data": await asyncio.to_thread(shelf().entries, salt)}

    @router.get("/v1/documents/{name}")
    async def one(name: str, salt: Salt = "") -> dict[str, Any]:
        """One of them."""
        return await asyncio.to_thread(shelf().entry, name, salt)

    @router.delete("/v1/documents/{name}")
    async def remove(name: str, salt: Salt = "") -> dict[str, Any]:
        """Delete it, or give its reading up."""
        await asyncio.to_thread(shelf().remove, name, salt)
        return {"object": "document.deleted", "id": name, "deleted": True}

    return router


def _end(shelf: Shelf, reading: Reading, salt: str) -> dict[str, Any]:
    if reading.error is not None:
        raise reading.error
    if reading.state != "ready":
        raise ApiError(409, f"the document {reading.name!r} was given up")
    return shelf.entry(reading.name, salt)


async def _progress(
    backend: Backend, shelf: Shelf, reading: Reading, salt: str
) -> AsyncIterator[bytes]:
    told: Any = None
    quiet_s = 0.0
    while not reading.over.is_set():
        now = (reading.state, reading.processed)
        if now != told:
            told, quiet_s = now, 0.0
            yield frame(reading.as_dict())
        elif quiet_s >= backend.settings.keep_alive_s:
            quiet_s = 0.0
            yield KEEP_ALIVE
        await asyncio.sleep(_LOOK_S)
        quiet_s += _LOOK_S
    try:
        yield frame(await asyncio.to_thread(_end, shelf, reading, salt))
        yield DONE
    except ApiError as error:
        yield frame(error.body())
