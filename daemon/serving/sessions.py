"""Who is connected: sessions by routing id, the lifelines that prove them alive, and what waits for a slow reader.

A session begins with Hello and belongs to the uid that the kernel names. Its lifeline must be attached within a grace
time; when the lifeline hangs up, the session is over in the same moment.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...client.arena.arena import ARENA, Layout
from ...client.lifeline import FrameKind, FrameReader, PeerCredentials, encode_frame, peer_credentials
from ...client.wire.errors import KVPoolError, ProtocolError
from ...client.wire.protocol import LIFELINE_TOKEN_BYTES
from ..engine.request import Request
from .arenas import SessionArena
from .keyring import RemoteUser
from .rings import Rings

if TYPE_CHECKING:
    from .parcels import Parcel

log = logging.getLogger(__name__)

RECEIVE_BYTES = 4096
ACCEPTS_PER_TURN = 8
AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


@dataclass(frozen=True, slots=True)
class Peer:
    """Who sent a message, as the kernel says, or (`remote`) as its key says. pid is 0 for a process of another pid
    namespace or another machine."""

    uid: int
    gid: int
    pid: int
    remote: RemoteUser | None = None

    @classmethod
    def from_address(cls, address: str) -> Peer | None:
        """From libzmq's `Peer-Address` of an ipc connection, `localhost:uid:gid:pid`."""
        parts = address.split(":")
        if len(parts) != 4 or not all(part.isdecimal() for part in parts[1:]):
            return None
        uid, gid, pid = map(int, parts[1:])
        return cls(uid, gid, pid)


@dataclass(slots=True, eq=False)
class Session:
    """One client's connection, and the requests whose names it owns."""

    routing_id: bytes
    peer: Peer
    client_name: str
    session_id: str
    token: bytes  # the client proves with it that lifeline and session are the same process's
    capabilities: frozenset[str] = frozenset()  # that both sides have
    lifeline: Lifeline | None = None
    arena: SessionArena | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    outbox: deque[tuple[Parcel, int]] = field(default_factory=deque)  # not sent yet, and bytes: its reader is slow
    held_bytes: int = 0  # of what is in the outbox
    closed: bool = False


@dataclass(slots=True, eq=False)
class Lifeline:
    """One accepted stream. `session` is None until its token came."""

    stream: socket.socket
    credentials: PeerCredentials
    due: float  # monotonic seconds; hung up then, if no token came
    frames: FrameReader = field(default_factory=FrameReader)
    session: Session | None = None

    def send(self, kind: FrameKind, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # a peer that is gone is noticed by reading
            socket.send_fds(self.stream, [encode_frame(kind, payload)], fds, AT_ONCE)


class Sessions:
    """All sessions and lifelines. `watch` and `unwatch` tell the loop which descriptors to poll.

    `arena_layout`: of the shared memory that sessions get which want it; None: there is none.
    """

    def __init__(
        self, watch: Callable[[int], None], unwatch: Callable[[int], None], arena_layout: Layout | None = None
    ) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._arena_layout = arena_layout
        self.rings = Rings()
        self._by_routing_id: dict[bytes, Session] = {}
        self._by_token: dict[bytes, Session] = {}  # those whose lifeline is still to come
        self._lifelines: dict[int, Lifeline] = {}  # by file descriptor

    def __len__(self) -> int:
        return len(self._by_routing_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_routing_id.values()))

    def get(self, routing_id: bytes) -> Session | None:
        return self._by_routing_id.get(routing_id)

    def count_of(self, uid: int) -> int:
        return sum(session.peer.uid == uid for session in self._by_routing_id.values())

    @property
    def capabilities(self) -> frozenset[str]:
        """What the daemon has beyond the messages."""
        return frozenset() if self._arena_layout is None else frozenset({ARENA})

    def open(self, routing_id: bytes, peer: Peer, client_name: str, wanted: Sequence[str] = ()) -> Session:
        """A new session, waiting for its lifeline; those of other machines have none. `wanted`: capabilities that its
        client has."""
        local = peer.remote is None
        session = Session(
            routing_id,
            peer,
            client_name,
            secrets.token_hex(8),
            secrets.token_bytes(LIFELINE_TOKEN_BYTES) if local else b"",
            self.capabilities.intersection(wanted) if local else frozenset(),
        )
        self._by_routing_id[routing_id] = session
        if local:
            self._by_token[session.token] = session
        elif peer.remote is not None:
            log.info("session %s of uid %d has key %r", session.session_id, peer.uid, peer.remote.name)
        return session

    def close(self, session: Session) -> None:
        """Forget the session and hang up. Its requests are the caller's to settle. Idempotent."""
        session.closed = True
        session.outbox.clear()
        self._by_routing_id.pop(session.routing_id, None)
        self._by_token.pop(session.token, None)
        if session.lifeline is not None:
            self._hang_up(session.lifeline)
        if session.arena is not None:
            session.arena.close()
            session.arena = None

    # Lifelines

    def accept(self, listener: socket.socket, due: float) -> bool:
        """Take some of the connections that wait. False: out of descriptors, the rest go on waiting in the backlog."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                stream, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            except OSError as error:
                return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
            stream.setblocking(False)
            self._lifelines[stream.fileno()] = Lifeline(stream, peer_credentials(stream), due)
            self._watch(stream.fileno())
        return True

    def read(self, fd: int) -> Session | None:
        """Take what came on a lifeline; the session that just ended, if one did."""
        lifeline = self._lifelines.get(fd)
        if lifeline is None:
            return None
        try:
            data = lifeline.stream.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._hang_up(lifeline)
            return lifeline.session
        try:
            for frame in lifeline.frames.feed(data):
                if frame.kind is not FrameKind.TOKEN or lifeline.session is not None:
                    raise ProtocolError("the only frame a client sends is its token, once", field="lifeline")
                self._attach(lifeline, frame.payload)
        except KVPoolError as error:
            lifeline.send(FrameKind.REFUSED, str(error).encode())
            self._hang_up(lifeline)
            return lifeline.session
        return None

    def _attach(self, lifeline: Lifeline, token: bytes) -> None:
        session = self._by_token.get(token)
        if session is None:
            raise ProtocolError("no session waits for this token; say hello first", field="lifeline_token")
        if not _same_process(lifeline.credentials, session.peer):
            raise ProtocolError("the token belongs to another process", field="lifeline_token")
        del self._by_token[token]
        lifeline.session, session.lifeline = session, lifeline
        if ARENA in session.capabilities:
            self._share_arena(session, lifeline)
        lifeline.send(FrameKind.ATTACHED)

    def _share_arena(self, session: Session, lifeline: Lifeline) -> None:
        """Without memory or descriptors for one the session does without: everything has another way to go."""
        try:
            session.arena = SessionArena(self._arena_layout, self.rings) if self._arena_layout else None
        except OSError as error:
            log.warning("no arena for session %s: %s", session.session_id, error)
        if session.arena is not None:
            lifeline.send(FrameKind.ARENA, fds=session.arena.fds)
            session.arena.forget_fds()

    def hang_up_overdue(self, now: float) -> None:
        """Hang up streams whose token did not come in time."""
        for lifeline in [lifeline for lifeline in self._lifelines.values() if lifeline.session is None]:
            if lifeline.due <= now:
                self._hang_up(lifeline)

    def _hang_up(self, lifeline: Lifeline) -> None:
        if self._lifelines.pop(lifeline.stream.fileno(), None) is not None:
            self._unwatch(lifeline.stream.fileno())
            lifeline.stream.close()

    def hang_up_all(self) -> None:
        """At the end of the daemon."""
        for lifeline in list(self._lifelines.values()):
            self._hang_up(lifeline)


def _same_process(credentials: PeerCredentials, peer: Peer) -> bool:
    """By uid, and by pid where both sides can name it (0: a process of another pid namespace)."""
    return credentials.uid == peer.uid and (0 in (credentials.pid, peer.pid) or credentials.pid == peer.pid)
