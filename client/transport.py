"""The sockets of one connection: a DEALER for messages, and what says that the daemon is gone. Nothing here waits (but
for the connect).

After every use the DEALER is drained, because its descriptor signals only changes: whoever touches it leaves nothing
unread behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from .address import Address, RemoteAddress
from .core import Core, DaemonGone, State
from .forking import after_fork_in_child
from .lifeline import connect_lifeline
from .wire.codec import CLIENT_LIMITS
from .wire.errors import ConnectionLost, KVPoolError, ProtocolError

GONE = "the daemon is gone (it stopped, crashed, or was killed)"
NOT_BEGUN = "the daemon hung up before a session began: it stopped, or this process is short of descriptors (ulimit -n)"
GRACE_S = 0.05  # after a hang-up, how long messages may still trickle out of ZeroMQ's own thread
GRACE_LIMIT_S = 0.5
GOODBYE_LINGER_MS = 100
MAX_FDS = 4  # that one read of the lifeline takes; the daemon sends one at a time
HEARTBEAT_MS, HEARTBEAT_LIMIT_MS = 10_000, 30_000  # to a daemon of another machine, by ZeroMQ's own thread


def open_transport(address: Address | RemoteAddress, timeout_s: float) -> Transport:
    """Raises ConnectionLost where no daemon listens (for another machine, `pump` does, a little later), or where no
    descriptor is left for sockets."""
    try:
        return RemoteTransport(address) if isinstance(address, RemoteAddress) else LocalTransport(address, timeout_s)
    except zmq.ZMQError as error:
        raise ConnectionLost(f"this process can open no sockets: {error.strerror}") from None


class Transport(ABC):
    """`filenos`: of the DEALER, and of what tells of the end."""

    filenos: tuple[int, int]
    _close: Callable[[], object]

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)  # credit bounds what can be on its way
        self._dealer.setsockopt(zmq.MAXMSGSIZE, CLIENT_LIMITS.max_message_bytes)

    @abstractmethod
    def greet(self, core: Core) -> None:
        """Tell the core how far the connection is."""

    @abstractmethod
    def _read_end(self, core: Core) -> bool:
        """Take in what came beside the messages; True when something did. Raises KVPoolError when it is the end."""

    def pump(self, core: Core, messages_ready: bool = True, end_ready: bool = True) -> bool:
        """Send what waits, take in what came; True when something came. Raises KVPoolError when the connection is over,
        after everything that arrived before its end was taken in.

        Not ready is what a poll has just found silent: asking ZeroMQ in vain costs more than reading the ring."""
        came = False
        if messages_ready or core.has_output:
            self._flush(core)
            came = self._drain(core)
        came = core.shared.read_ring() or came
        if end_ready:
            came = self._read_end(core) or came
        if core.has_output:  # what came asked for an answer
            self._flush(core)
            came = self._drain(core) or came
        return came

    def _flush(self, core: Core) -> None:
        if self._dealer.closed:  # by the finalizer: the interpreter ends, and somebody's stream only now
            raise ConnectionLost("this process ends")
        while core.outbox:
            try:
                self._dealer.send(core.outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                break
            core.outbox.popleft()

    def _drain(self, core: Core) -> bool:
        came = False
        while int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN:  # `Again` would cost more than the answer
            parts = self._dealer.recv_multipart(zmq.NOBLOCK)
            if len(parts) != 1:
                raise ProtocolError("a message must be one frame")
            core.receive(parts[0])
            came = True
        return came

    def _drain_last(self, core: Core) -> None:
        give_up = time.monotonic() + GRACE_LIMIT_S
        while self._dealer.poll(int(GRACE_S * 1000)) and time.monotonic() < give_up:
            self._drain(core)

    def close(self, core: Core | None = None) -> None:
        """Close both, first trying for a moment to send what `core` still has to say. Idempotent."""
        if core is not None and core.outbox and not self._dealer.closed:
            with contextlib.suppress(KVPoolError, zmq.ZMQError):
                self._flush(core)
                self._dealer.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
        self._close()


class LocalTransport(Transport):
    """On one machine the lifeline tells of the end. Opens both sockets at once."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._lifeline = connect_lifeline(address.lifeline_path, timeout_s)
        try:
            super().__init__()
        except zmq.ZMQError:
            self._lifeline.close()
            raise
        self._close = weakref.finalize(
            self, _close_all, os.getpid(), [self._dealer], self._context, self._lifeline.close
        )
        self._dealer.connect(address.endpoint)
        after_fork_in_child(self._abandon_after_fork)
        self.filenos = (int(self._dealer.getsockopt(zmq.FD)), self._lifeline.fileno())

    def greet(self, core: Core) -> None:
        core.connected(time.monotonic())

    def _flush(self, core: Core) -> None:
        super()._flush(core)
        if core.lifeline_outbox:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                sent = self._lifeline.send(core.lifeline_outbox)
                del core.lifeline_outbox[:sent]

    def _read_end(self, core: Core) -> bool:
        """True when something came. Raises ConnectionLost when the daemon hung up."""
        try:
            data, fds, _, _ = socket.recv_fds(self._lifeline, 4096, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._drain_last(core)
            raise DaemonGone(GONE if core.state is State.READY else NOT_BEGUN)
        core.receive_lifeline(data, fds)
        return True

    def _abandon_after_fork(self) -> None:
        """In a child process: let go of the parent's lifeline, so that the parent's death is still seen."""
        self._lifeline.close()


class RemoteTransport(Transport):
    """Between machines ZeroMQ's own events tell of the end: a connection that closes, or does not answer heartbeats."""

    def __init__(self, address: RemoteAddress) -> None:
        super().__init__()
        self._address = address
        dealer = self._dealer
        try:
            events = self._context.socket(zmq.PAIR)
        except zmq.ZMQError:
            dealer.close()
            raise
        self._events = events
        self._close = weakref.finalize(self, _close_all, os.getpid(), [dealer, events], self._context, lambda: None)
        for option, value in {
            zmq.IPV6: 1,
            zmq.RECONNECT_IVL: -1,  # another connection is another session: the client begins it
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_LIMIT_MS,
        }.items():
            dealer.setsockopt(option, value)
        if address.keys is not None:
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, address.keys.own.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, address.keys.own.secret)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, address.keys.server)
        dealer.monitor("inproc://events", zmq.EVENT_ALL)
        self._events.connect("inproc://events")
        dealer.connect(address.endpoint)
        self.filenos = (int(dealer.getsockopt(zmq.FD)), int(self._events.getsockopt(zmq.FD)))

    def greet(self, core: Core) -> None:
        core.connecting()

    def _read_end(self, core: Core) -> bool:
        came = False
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = int(parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                core.connected(time.monotonic())
                came = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._drain_last(core)
                raise DaemonGone("the daemon is gone, or cannot be reached any more")
            elif event in _REFUSALS:
                raise ConnectionLost(f"{self._address}: {_REFUSALS[event]}")
        return came


KEYS_DIFFER = "only one side works with keys (set server_key and key_file), or the daemon's is another than server_key"
_REFUSALS: dict[int, str] = {
    zmq.EVENT_CLOSED: "no daemon listens there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the daemon does not know this client's key; add it to its authorised_keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: KEYS_DIFFER,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: KEYS_DIFFER,
}


def _close_all(
    pid: int,
    sockets: list[zmq.Socket[bytes]],
    context: zmq.Context[zmq.Socket[bytes]],
    last: Callable[[], object],
) -> None:
    """Also when a transport is garbage-collected: a context that went first would wait for its socket for ever."""
    if os.getpid() == pid:  # ZeroMQ's sockets are not a forked child's to close
        for each in sockets:
            each.close()
        context.term()
    last()  # the lifeline, so that a goodbye is on its way before the hang-up
