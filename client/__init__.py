"""The client library and the wire: everything a process needs to use a kvpool daemon."""

from .aio import AsyncClient, AsyncSequence
from .aio_stream import AsyncStream
from .client import Client, Sequence
from .keys_values import SequenceKV
from .results import Output, Result, TokenEvent
from .sampling_params import SamplingParams
from .stream import Stream
from .wire.errors import (
    Busy,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KVPoolError,
    NeverFits,
    NotFound,
    NotOwner,
    NumericError,
    ProtocolError,
    QuotaExceeded,
    ShuttingDown,
    Timeout,
    TooLong,
    Unsupported,
)
from .wire.messages import ChatMessage, Usage

__all__ = [
    "AsyncClient",
    "AsyncSequence",
    "AsyncStream",
    "Busy",
    "Cancelled",
    "ChatMessage",
    "Client",
    "ConnectionLost",
    "DeadlineExceeded",
    "InternalError",
    "InvalidArgument",
    "KVPoolError",
    "NeverFits",
    "NotFound",
    "NotOwner",
    "NumericError",
    "Output",
    "ProtocolError",
    "QuotaExceeded",
    "Result",
    "SamplingParams",
    "Sequence",
    "SequenceKV",
    "ShuttingDown",
    "Stream",
    "Timeout",
    "TokenEvent",
    "TooLong",
    "Unsupported",
    "Usage",
]
