"""Errors as OpenAI's clients expect them: an HTTP status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from typing import Any

from ..wire.errors import KVPoolError

STATUS_BY_CODE = {
    "invalid_argument": 400,
    "too_long": 400,
    "never_fits": 400,
    "unsupported": 400,
    "not_owner": 403,
    "not_found": 404,
    "quota": 429,
    "busy": 429,
    "cancelled": 499,
    "internal": 500,
    "numeric": 500,
    "shutting_down": 503,
    "connection_lost": 503,
    "deadline": 504,
    "timeout": 504,
}
"""The statuses that gRPC's codes of the same meaning are mapped to; 499 is an answer that somebody else ended."""

CODE_OF_OPENAI = {"too_long": "context_length_exceeded", "busy": "rate_limit_exceeded", "quota": "insufficient_quota"}
"""Where OpenAI has a code of its own that programs look for."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HTTPError(Exception):
    """What the gateway itself refuses."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: KVPoolError | HTTPError) -> int:
    return error.status if isinstance(error, HTTPError) else STATUS_BY_CODE.get(error.code, 500)


def body_of(error: KVPoolError | HTTPError) -> dict[str, Any]:
    if isinstance(error, HTTPError):
        return error_body(error.status, error.message, code=error.code, param=error.param)
    code = CODE_OF_OPENAI.get(error.code, error.code)
    return error_body(status_of(error), str(error), code=code, param=error.field)


def headers_of(error: KVPoolError | HTTPError) -> dict[str, str]:
    """When to try again, as HTTP says it (whole seconds) and as OpenAI's clients prefer it."""
    if isinstance(error, HTTPError):
        return {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_ms is None:
        return {}
    seconds = max(1, math.ceil(error.retry_after_ms / 1000))
    return {"Retry-After": str(seconds), "retry-after-ms": str(error.retry_after_ms)}
