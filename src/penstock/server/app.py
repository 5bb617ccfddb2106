"""make_app(): a server's routes over an engine, as an ASGI application."""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import PenstockError
from penstock.documents.document_library import DocumentLibrary
from penstock.documents.settings import Memory
from penstock.generation.serving.engine import Engine
from penstock.server.backend import Backend
from penstock.server.chat import chat_routes
from penstock.server.completions import completion_routes
from penstock.server.documents import document_routes
from penstock.server.errors import LOG, ApiError, as_api_error, of_validation
from penstock.server.generating import ClientGoneError
from penstock.server.info import info_routes
from penstock.server.messages import messages_routes
from penstock.server.meters import Meters
from penstock.server.page_routes import page_routes
from penstock.server.responses import responses_routes
from penstock.server.settings import ServerSettings
from penstock.server.shelf import Shelf

OPEN_PATHS = frozenset({"/", "/health", "/page.css", "/page.js"})
"""What is answered without a key: no text and no figure of anyone."""
_GONE = 499
Application = FastAPI
"""What `make_app` and `make_front` make."""


def make_app(
    engine: Engine, settings: ServerSettings, library: DocumentLibrary | None = None,
    document_memory: Memory = "auto",
) -> FastAPI:  # fmt: skip
    """The application of one server.

    Args:
        engine: that is the caller's, and stays open.
        library: documents that can be asked by name, and where new ones come; None: no documents.
            Close `app.state.backend.shelf` before the engine.
        document_memory: of the cache that reads a new document.
    """
    backend = Backend(engine, settings, Meters(settings.model_name, engine.stats))
    inside = engine.llm.loaded.name
    if inside != settings.model_name:
        backend.names[inside] = settings.model_name
    if library is not None:
        backend.shelf = Shelf(
            library, engine.llm.loaded, memory=document_memory, names=backend.names
        )
        backend.meters.count(backend.shelf.counts)
    # The documentation pages fetch scripts from the web; /openapi.json alone stays.
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None)
    app.state.backend = backend
    for routes in (
        chat_routes, completion_routes, responses_routes, messages_routes, document_routes,
        info_routes, page_routes,
    ):  # fmt: skip
        app.include_router(routes(backend))
    return _guarded(app, settings, backend.names)


def make_front(behind: ASGIApp, settings: ServerSettings) -> FastAPI:
    """The application in front of others, which checks keys, hosts and lengths for them.

    Args:
        behind: gets every request; an `ApiError` of its is answered in the client's shape. It is
            what `serving.serve` watches.
    """
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.backend = behind
    app.mount("/", behind)
    return _guarded(app, settings, {})


def _guarded(app: FastAPI, settings: ServerSettings, names: Mapping[str, str]) -> FastAPI:
    _handle_errors(app, names)
    app.add_middleware(_Guard, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"],
            allow_headers=["*"],
        )  # fmt: skip
    if "*" not in settings.allowed_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.allowed_hosts))
    return app


def _handle_errors(app: FastAPI, names: Mapping[str, str]) -> None:
    async def answer(http: Request, error: Exception) -> Response:
        return as_api_error(error, names).response(http.url.path)

    async def invalid(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response(http.url.path)

    async def plain(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "there is no such address here", 405: "not by this method"}
        message = said.get(error.status_code, str(error.detail))
        given = dict(error.headers or {})
        return ApiError(error.status_code, message, headers=given).response(http.url.path)

    async def gone(http: Request, error: Exception) -> Response:
        return Response(status_code=_GONE)

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        ApiError: answer, PenstockError: answer, RequestValidationError: invalid,
        HTTPException: plain, ClientGoneError: gone, Exception: answer,
    }  # fmt: skip
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


class _Guard:
    """Wants the key, and no more of a body than is allowed."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        began_s, status, path = time.monotonic(), _GONE, scope["path"]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass_on(scope, receive, noted, headers)
        finally:
            took_ms = round(1000 * (time.monotonic() - began_s))
            fields = {"method": scope["method"], "path": path, "status": status, "ms": took_ms}
            LOG.info("%s %s %d %d ms", *fields.values(), extra={"fields": fields})

    async def _pass_on(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]
    ) -> None:
        refusal = self._refusal(scope["path"], scope["method"], headers)
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._settings.max_body_bytes:
                raise HTTPException(413, _too_large(self._settings))
            return message

        await self._app(scope, counted, send)

    def _refusal(self, path: str, method: str, headers: dict[bytes, bytes]) -> ApiError | None:
        key = self._settings.api_key
        if key is not None and path not in OPEN_PATHS and method != "OPTIONS":
            bearer = headers.get(b"authorization", b"").decode("latin-1")
            given = headers.get(b"x-api-key", b"").decode("latin-1")
            scheme, _, token = bearer.partition(" ")
            given = given or (token.strip() if scheme.lower() == "bearer" else "")
            if not secrets.compare_digest(given.encode(), key.encode()):
                return ApiError(
                    401, "the API key is missing or wrong", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            return ApiError(413, _too_large(self._settings))
        return None


def _too_large(settings: ServerSettings) -> str:
    return f"the body is larger than {settings.max_body_bytes:,} bytes"
