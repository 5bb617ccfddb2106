"""What a server says of itself, and what it does not do: /health, /metrics, /v1/models."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from penstock.models.model_shape import inspect_model
from penstock.server.backend import Backend
from penstock.server.bodies import Body
from penstock.server.errors import ApiError

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class TokenizeBody(Body):
    """Of /tokenize, llama.cpp's names and vLLM's."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False


class DetokenizeBody(Body):
    """Of /detokenize."""

    tokens: list[int]


def info_routes(backend: Backend) -> APIRouter:
    """The routes of a backend."""
    router, started = APIRouter(), int(time.time())

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether requests are taken."""
        if backend.is_closing:
            raise ApiError(503, "the server is shutting down")
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics() -> Response:
        """Counters in Prometheus's text format."""
        return Response(backend.meters.text(), headers={"Content-Type": _PROMETHEUS})

    def model() -> dict[str, Any]:
        limit = backend.settings.max_model_len or inspect_model(backend.loaded.model).max_positions
        return {
            "id": backend.settings.model_name, "object": "model", "created": started,
            "owned_by": "penstock", "max_model_len": limit,
        }  # fmt: skip

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The same, by its name."""
        backend.check_model(name)
        return model()

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refused: a decoder's states are no embeddings that a search could use."""
        raise ApiError(501, "embeddings are not made here; ask a model that was trained for them")

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text."""
        text = body.content if body.content is not None else body.prompt or ""

        def encode() -> list[int]:
            encoded = backend.tokenizer(text, add_special_tokens=body.add_special, verbose=False)
            return [int(each) for each in encoded["input_ids"]]

        ids = await asyncio.to_thread(encode)
        return {"tokens": ids, "count": len(ids)}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        size = int(backend.loaded.model.get_input_embeddings().weight.shape[0])
        wrong = next((each for each in body.tokens if not 0 <= each < size), None)
        if wrong is not None:
            raise ApiError(
                400, f"there is no token {wrong}; the model has {size:,}", param="tokens"
            )
        text = await asyncio.to_thread(backend.tokenizer.decode, body.tokens)
        return {"content": text, "prompt": text}

    return router
