"""ApiError: what a client is told went wrong, in OpenAI's shape or Anthropic's."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from penstock.core.errors import (
    BudgetError,
    CacheStateError,
    ConfigError,
    DocumentBusyError,
    PenstockError,
    PromptError,
    QueueFullError,
    StorageError,
    StoreFullError,
)

LOG = logging.getLogger("penstock.server")

_TYPES: Mapping[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    409: ("conflict_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    501: ("not_implemented_error", "invalid_request_error"),
    503: ("service_unavailable_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
    507: ("insufficient_storage_error", "api_error"),
}
"""By status: OpenAI's type, and Anthropic's."""
_SERVER = ("server_error", "api_error")
_PATH = re.compile(r"(?<![\w/.:<])~?/(?!v1/)[^\s'\",;:()]+")
"""A path of this machine in a message; `</tag>` and URLs are none."""
ANTHROPIC = "/v1/messages"


class ApiError(Exception):
    """An answer with a status of 400 or more.

    Attributes:
        param: the field that is wrong, if one is.
        code: for programs; else the type says enough.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """As JSON."""
        openai, other = _TYPES.get(self.status, _SERVER)
        if anthropic:
            return {"type": "error", "error": {"type": other, "message": self.message}}
        return {
            "error": {
                "message": self.message, "type": openai, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    def response(self, path: str) -> JSONResponse:
        """The answer to a request of a path, in the shape that its clients read."""
        is_anthropic = path.startswith(ANTHROPIC)
        return JSONResponse(
            self.body(anthropic=is_anthropic), self.status, headers=self.headers or None
        )


def refused(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be done as it is."""
    return ApiError(400, message, param=param)


def without_paths(message: str, names: Mapping[str, str] | None = None) -> str:
    """A message as others may read it.

    Args:
        names: what to call what is called otherwise here, such as a model by its folder.
    """
    for inside, outside in (names or {}).items():
        message = message.replace(inside, outside)
    return " ".join(_PATH.sub("[path]", message).split())


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """What a client is told of an error; what it is not told is logged.

    Args:
        names: as for `without_paths`.
    """
    if isinstance(error, ApiError):
        return error
    said = without_paths(str(error), names)
    match error:
        case QueueFullError():
            after = str(math.ceil(error.retry_after_s))
            return ApiError(429, said, code="rate_limit_exceeded", headers={"Retry-After": after})
        case BudgetError():
            return ApiError(400, said, code="memory_budget_exceeded")
        case PromptError():
            too_long = "positions" in said or "max_model_len" in said
            return ApiError(400, said, code="context_length_exceeded" if too_long else None)
        case ConfigError():
            return ApiError(400, said)
        case CacheStateError():
            return ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})
        case DocumentBusyError():
            return ApiError(409, "the document is busy; try again later")
        case StoreFullError():
            LOG.error("store full: %s", error)
            return ApiError(507, "the store has no room for this request; make it shorter")
        case StorageError():
            LOG.error("storage: %s", error)
            return ApiError(500, "the store failed; the server's log says how")
        case PenstockError():
            LOG.error("%s: %s", type(error).__name__, error)
            return ApiError(500, said)
    LOG.error("unexpected %s", type(error).__name__, exc_info=error)
    return ApiError(500, f"unexpected {type(error).__name__}; the server's log says where")


def of_validation(errors: Sequence[Any]) -> ApiError:
    """A request whose body is not as its description says."""
    first: Any = errors[0] if errors else {}
    place = [str(each) for each in first.get("loc", ()) if each != "body"]
    said = str(first.get("msg", "it cannot be read")).removeprefix("Value error, ")
    where = ".".join(place)
    message = f"{where}: {said}" if where else said
    return ApiError(400, message, param=where or None, code="invalid_value")
