"""The way in for new connections, which shuts before the process runs out of file descriptors.

libzmq accepts connections on its own thread, and ends the process when accept() fails with EMFILE. So it must not get
that far: it accepts at a descriptor that was given to it, and while descriptors are short another socket lies under
that number, one that nobody can connect to. Who comes meanwhile is refused here; who is there notices nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

RESERVE_SHARE = 4
"""A quarter of the descriptors stays free, for what is accepted until the loop notices and for the daemon itself:
16,384 of the 65,536 that a daemon asks for. With a hard limit of a few hundred, a flood can be faster than the loop."""

REFUSALS_PER_TURN = 64
NOWHERE_SUFFIX = ".none"  # not longer than that of the lifelines


class Gate:
    """Lets a router accept at `listener`, whose address is `endpoint`, from the first `open` on. Shut, it refuses: call
    `refuse` when `listener` is readable. `beside`: a path at which a socket can be made for a moment. With `notes_ends`
    it can say which connections have ended."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        endpoint: str,
        listener: socket.socket,
        beside: Path,
        *,
        notes_ends: bool = False,
    ) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.listener = listener
        self.is_open = False
        self.ceiling = limit - limit // RESERVE_SHARE
        self._router = router
        self._endpoint = endpoint
        self._hung_up: list[int] = []
        self._nowhere = _unreachable(beside.with_name(beside.name + NOWHERE_SUFFIX))
        self._given = -1  # the descriptor at which libzmq accepts; it closes it
        events = f"inproc://accepted-{id(self)}"
        router.monitor(events, zmq.EVENT_ACCEPTED | (zmq.EVENT_DISCONNECTED if notes_ends else 0))
        self._accepted = router.context.socket(zmq.PAIR)
        self._accepted.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread must never wait for us
        self._accepted.connect(events)
        self._take_events()  # the descriptor polls readable only for what comes after a look that found nothing
        # Swapping sockets must not let anybody wait in accept() for a connection that is gone.
        listener.setblocking(False)
        self._nowhere.setblocking(False)

    def fileno(self) -> int:
        """Polls readable, at edges, when connections came or went: then call `is_short`."""
        return int(self._accepted.getsockopt(zmq.FD))

    def open(self) -> None:
        """Accept connections."""
        if self._given < 0:
            self._given = os.dup(self.listener.fileno())
            self._router.setsockopt(zmq.USE_FD, self._given)
            self._router.bind(self._endpoint)
        elif not self.is_open:
            os.dup2(self.listener.fileno(), self._given, inheritable=False)
        self.is_open = True

    def shut(self) -> None:
        """Accept nothing from now on."""
        os.dup2(self._nowhere.fileno(), self._given, inheritable=False)
        self.is_open = False

    def is_short(self) -> bool:
        """Whether the next descriptor would come out of the reserve. Quick: asked after every connection."""
        self._take_events()
        try:
            lowest_free = os.dup(self.listener.fileno())
        except OSError:
            return True
        os.close(lowest_free)
        return lowest_free >= self.ceiling

    def _take_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while event := parse_monitor_message(self._accepted.recv_multipart(zmq.NOBLOCK)):
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._hung_up.append(int(event["value"]))

    def take_hung_up(self) -> list[int]:
        """Descriptors of connections that have ended since the last call. The numbers may be in use again."""
        hung_up, self._hung_up = self._hung_up, []
        return hung_up

    def has_room_again(self) -> bool:
        """Whether the reserve is whole; counts, as low numbers may be free where high ones are taken."""
        try:
            return len(os.listdir("/proc/self/fd")) < self.ceiling
        except OSError:
            return False

    def refuse(self) -> None:
        """Hang up on who waits."""
        with contextlib.suppress(OSError):
            for _ in range(REFUSALS_PER_TURN):
                self.listener.accept()[0].close()

    def close(self) -> None:
        """Before the router closes, which must find its own socket again."""
        if self._given >= 0:
            self.open()
        self._router.disable_monitor()
        self._accepted.close(linger=0)
        self._nowhere.close()


def _unreachable(path: Path) -> socket.socket:
    """A listening socket without a name."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        path.unlink()
        listener.listen(1)
    finally:
        os.umask(before)
    return listener
