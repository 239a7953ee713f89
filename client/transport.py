"""The two sockets of one connection: a DEALER for messages and the lifeline. Nothing here waits (but for the connect).

After every use the DEALER is drained, because its descriptor signals only changes: whoever touches it leaves nothing
unread behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref

import zmq

from .address import Address
from .codec import CLIENT_LIMITS
from .core import Core, DaemonGone
from .errors import KVPoolError, ProtocolError
from .forking import after_fork_in_child
from .lifeline import connect_lifeline

GRACE_S = 0.05  # after a hang-up, how long messages may still trickle out of ZeroMQ's own thread
GRACE_LIMIT_S = 0.5
GOODBYE_LINGER_MS = 100
MAX_FDS = 4  # that one read of the lifeline takes; the daemon sends one at a time


class Transport:
    """Opens both sockets at once. Raises ConnectionLost where no daemon listens."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._lifeline = connect_lifeline(address.lifeline_path, timeout_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)  # credit bounds what can be on its way
        self._dealer.setsockopt(zmq.MAXMSGSIZE, CLIENT_LIMITS.max_message_bytes)
        self._close = weakref.finalize(self, _close_all, os.getpid(), self._lifeline, self._dealer, self._context)
        self._dealer.connect(address.endpoint)
        after_fork_in_child(self._abandon_after_fork)
        self.filenos: tuple[int, int] = (int(self._dealer.getsockopt(zmq.FD)), self._lifeline.fileno())

    def pump(self, core: Core, lifeline_ready: bool = True) -> bool:
        """Send what waits, take in what came; True when something came. Raises KVPoolError when the connection is over,
        after everything that arrived before its end was taken in."""
        self._flush(core)
        came = self._drain(core)
        if lifeline_ready:
            came = self._read_lifeline(core) or came
        if core.has_output:  # what came asked for an answer
            self._flush(core)
            came = self._drain(core) or came
        return came

    def _flush(self, core: Core) -> None:
        while core.outbox:
            try:
                self._dealer.send(core.outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                break
            core.outbox.popleft()
        if core.lifeline_outbox:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                sent = self._lifeline.send(core.lifeline_outbox)
                del core.lifeline_outbox[:sent]

    def _drain(self, core: Core) -> bool:
        came = False
        while True:
            try:
                parts = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return came
            if len(parts) != 1:
                raise ProtocolError("a message must be one frame")
            core.receive(parts[0])
            came = True

    def _drain_last(self, core: Core) -> None:
        give_up = time.monotonic() + GRACE_LIMIT_S
        while self._dealer.poll(int(GRACE_S * 1000)) and time.monotonic() < give_up:
            self._drain(core)

    def _read_lifeline(self, core: Core) -> bool:
        """True when something came. Raises ConnectionLost when the daemon hung up."""
        try:
            data, fds, _, _ = socket.recv_fds(self._lifeline, 4096, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._drain_last(core)
            raise DaemonGone("the daemon is gone (it stopped, crashed, or was killed)")
        core.receive_lifeline(data, fds)
        return True

    def close(self, core: Core | None = None) -> None:
        """Close both, first trying for a moment to send what `core` still has to say. Idempotent."""
        if core is not None and core.outbox and self._close.alive:
            with contextlib.suppress(KVPoolError, zmq.ZMQError):
                self._flush(core)
                self._dealer.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
        self._close()

    def _abandon_after_fork(self) -> None:
        """In a child process: let go of the parent's lifeline, so that the parent's death is still seen."""
        self._lifeline.close()


def _close_all(
    pid: int, lifeline: socket.socket, dealer: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Also when a transport is garbage-collected: a context that went first would wait for its socket for ever."""
    if os.getpid() == pid:  # ZeroMQ's sockets are not a forked child's to close
        dealer.close()
        context.term()
    lifeline.close()  # last, so that a goodbye is on its way before the hang-up
