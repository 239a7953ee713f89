"""What can go wrong, as one exception per code of the wire, under one base.

The codes are the daemon's vocabulary (PROTOCOL.md); `connection_lost` and `timeout` are the client's own and never
travel. Every error says what to do in its message, names the `field` that was wrong where there is one, and carries
`retry_after_ms` when trying again later can help.
"""

from __future__ import annotations

from typing import ClassVar


class KVPoolError(Exception):
    """Base of everything kvpool raises on purpose."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidArgument(KVPoolError, ValueError):
    """A value is of the wrong type or out of its range; `field` names it."""

    code = "invalid_argument"


class TooLong(KVPoolError):
    """Prompt (plus `max_tokens`) longer than `max_model_len`, or a message longer than `max_message_bytes`."""

    code = "too_long"


class NeverFits(KVPoolError):
    """The request could not finish even in an empty pool."""

    code = "never_fits"


class QuotaExceeded(KVPoolError):
    """The caller's share of blocks, sequences or queue places does not allow this, now or ever."""

    code = "quota"


class Busy(KVPoolError):
    """The queue is full; try again after `retry_after_ms`."""

    code = "busy"


class NotFound(KVPoolError):
    """No request, sequence or snapshot has this name."""

    code = "not_found"


class NotOwner(KVPoolError):
    """It exists, and belongs to another user."""

    code = "not_owner"


class DeadlineExceeded(KVPoolError):
    """The request's deadline passed before it produced what was asked."""

    code = "deadline"


class Cancelled(KVPoolError):
    """Somebody who may do so cancelled the request."""

    code = "cancelled"


class ShuttingDown(KVPoolError):
    """The daemon is draining and takes no new work."""

    code = "shutting_down"


class Unsupported(KVPoolError):
    """This daemon, model or device does not do that."""

    code = "unsupported"


class NumericError(KVPoolError):
    """The model produced NaN or infinity for this sequence; others are not concerned."""

    code = "numeric"


class InternalError(KVPoolError):
    """A bug in the daemon; its log has the details."""

    code = "internal"


class ConnectionLost(KVPoolError, ConnectionError):
    """There is no daemon at the address, or the connection to it ended."""

    code = "connection_lost"


class Timeout(KVPoolError, TimeoutError):
    """The wait that `field` names was longer than its limit. What was asked may still be running."""

    code = "timeout"


class ProtocolError(InvalidArgument):
    """Bytes that are not a valid message; says which field, and of which request or call as far as it could be read."""

    def __init__(
        self, message: str, *, field: str | None = None, request_id: str | None = None, call_id: int | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.request_id = request_id
        self.call_id = call_id


ERRORS_BY_CODE: dict[str, type[KVPoolError]] = {
    error.code: error
    for error in (
        InvalidArgument,
        TooLong,
        NeverFits,
        QuotaExceeded,
        Busy,
        NotFound,
        NotOwner,
        DeadlineExceeded,
        Cancelled,
        ShuttingDown,
        Unsupported,
        NumericError,
        InternalError,
    )
}
"""The codes that travel."""


def from_code(code: str, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> KVPoolError:
    """The exception for a code of the wire; a code from a newer daemon becomes `InternalError`."""
    return ERRORS_BY_CODE.get(code, InternalError)(message, field=field, retry_after_ms=retry_after_ms)
