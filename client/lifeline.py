"""The lifeline: a Unix stream socket beside the messages, whose hang-up means that the other side is dead.

The client connects it first (so a daemon that is not there is noticed at once), and after Welcome sends the session's
token over it; the daemon compares the peer's credentials, which come from the kernel, with the session's and answers
`ATTACHED`. From then on it carries descriptors of shared memory. The kernel closes the stream however a process ends,
and the other side's poll returns in the same moment: no heartbeat exists, so no live client is ever taken for dead.

A frame is an 8-byte header (magic, kind, payload length) and its payload; both ends use `encode_frame`, `FrameReader`.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from .wire.errors import ConnectionLost, ProtocolError

LIFELINE_SUFFIX = ".life"
MAGIC = b"KVL1"
MAX_PAYLOAD_BYTES = 4096

_HEADER = struct.Struct("<4sHH")  # magic, kind, payload length
_CREDENTIALS = struct.Struct("3i")  # struct ucred


class FrameKind(IntEnum):
    TOKEN = 1  # client to daemon: the lifeline_token of Welcome
    ATTACHED = 2  # daemon to client: the stream now stands for the session; no payload
    REFUSED = 3  # daemon to client: why not, as text; the daemon hangs up after it
    ARENA = 4  # daemon to client, before ATTACHED: with the descriptors of the session's arena and bell; no payload
    POOL_MAP = 6  # daemon to client: with the descriptor of the pool map's segment; no payload


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who holds the other end, as the kernel recorded it when the connection was made."""

    pid: int
    uid: int
    gid: int


def encode_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Raises ValueError for a payload over MAX_PAYLOAD_BYTES."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a lifeline frame carries at most {MAX_PAYLOAD_BYTES} bytes")
    return _HEADER.pack(MAGIC, kind, len(payload)) + payload


_KINDS = frozenset(kind.value for kind in FrameKind)


class FrameReader:
    """Frames out of a byte stream that arrives in pieces. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises ProtocolError on bytes that cannot be one."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER.size:
            magic, kind, length = _HEADER.unpack_from(self._buffer)
            if magic != MAGIC or length > MAX_PAYLOAD_BYTES or kind not in _KINDS:
                raise ProtocolError("not a lifeline frame", field="lifeline")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(Frame(FrameKind(kind), bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return frames


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """SO_PEERCRED of a connected Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(raw))


def connect_lifeline(path: Path, timeout_s: float) -> socket.socket:
    """A connected, non-blocking stream. Raises ConnectionLost saying what is wrong and what to do."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ConnectionLost(f"this process can open no sockets: {error.strerror or error}") from None
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.setblocking(False)
    except OSError as error:
        connection.close()
        raise ConnectionLost(f"no daemon: {_advice(error, path)}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _advice(error: OSError, path: Path) -> str:
    where = path.with_name(path.name.removesuffix(LIFELINE_SUFFIX))
    if error.errno == errno.ENOENT and where.exists():
        return f"{where} is not a daemon's socket, as there is no {path.name} beside it"
    if error.errno == errno.ENOENT:
        return f"{where} does not exist; start kvpoold, or set KVPOOL_ADDRESS to its socket"
    if error.errno == errno.ECONNREFUSED:
        return f"{where} was left behind by a daemon that is gone; start kvpoold again"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not use {where}; ask for membership of the socket's group"
    return f"{where}: {error.strerror or error}"
