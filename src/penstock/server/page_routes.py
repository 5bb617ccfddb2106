"""The page at /: its three files, which the package brings."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from penstock.server.backend import Backend

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    # Nothing from elsewhere, no script in the text of an answer, no frame around it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}  # fmt: skip


def page_routes(backend: Backend) -> APIRouter:
    """The routes of the files."""
    del backend
    router, folder = APIRouter(), Path(__file__).parent / "page"

    def add(path: str, name: str, kind: str) -> None:
        content = (folder / name).read_bytes()

        @router.get(path, include_in_schema=False)
        async def file() -> Response:
            return Response(content, headers={**_HEADERS, "Content-Type": kind})

    for path, (name, kind) in _FILES.items():
        add(path, name, kind)
    return router
