"""A connection that its waiting threads drive themselves: no thread of its own, no wake-up per token between threads.

Of the threads that wait, one polls the sockets and takes in what comes for all of them; the others sleep on the
condition until it says that something changed, and when it has what it waited for, another takes its place. Sending is
done by whoever has something to send. So a program with one thread costs one poll per message, a client that nobody
waits on costs nothing, and a fork or a Ctrl-C finds no helper thread in an unknown state.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import TypeVar

from .address import Whereabouts
from .arena.bell import hush
from .arena.descriptors import OutOfDescriptors
from .core import Core, State
from .forking import after_fork_in_child
from .stream_state import StreamState
from .transport import Transport, open_transport
from .wire.errors import ConnectionLost, KVPoolError, ProtocolError, Timeout
from .wire.messages import Welcome

RETRY_S = 0.1
"""Between attempts to reconnect for requests that wait."""

T = TypeVar("T")


class Connection:
    """Owns the core and, while connected, the transport. Safe to use from several threads."""

    def __init__(
        self, where: Whereabouts, timeout_s: float, client_name: str, reconnect_s: float = 0.0, *, arena: bool = True
    ) -> None:
        self.timeout_s = timeout_s
        self.core = Core(client_name, reconnect_s=reconnect_s, patience_s=timeout_s, arena=arena)
        self._where = where
        self._make_lock()
        self._transport: Transport | None = None
        self._poller = select.poll()
        self._bell_fd = -1  # that is polled
        self._make_wake_fd()
        self._driving = False
        self._closed = False
        self._retry_at = 0.0  # monotonic seconds
        self._dropped: deque[StreamState] = deque()  # streams that were garbage-collected unread
        self._inherited: list[Transport] = []  # of the process this one was forked from
        after_fork_in_child(self._after_fork)

    # ---- for the client

    def connect(self) -> Welcome:
        """Return, once the session is ready, whose it is. Raises ConnectionLost, or Timeout naming timeout_s."""
        with self._held():
            if self._transport is not None and not self._driving:
                self._pump()  # nobody has looked for a while: the daemon may be another one by now
            if self.core.state is State.DISCONNECTED:
                self._open(self.timeout_s)
        return self.wait(
            self._ready, self.timeout_s, "timeout_s", "the daemon's welcome (it may still be loading its model)"
        )

    def _ready(self) -> Welcome | None:
        if self.core.state is State.DISCONNECTED:
            raise self.core.last_error or ConnectionLost("not connected")
        return self.core.welcome if self.core.state is State.READY else None

    @contextlib.contextmanager
    def using(self) -> Iterator[Core]:
        """Hold the core to change it; what it has to say is sent at the end."""
        with self._held():
            yield self.core
            self._pump_for_others()

    def wait(self, ready: Callable[[], T | None], timeout_s: float, field: str, what: str) -> T:
        """The first value that `ready` returns, or what it raises. It is called with the core held, first at once and
        then whenever something changed. Raises Timeout naming `field` and `what` was waited for."""
        try:
            with self._lock:
                value = ready()
                if value is None:
                    value = self._wait_for(ready, timeout_s, field, what)
                if self.core.has_output:
                    self._pump_for_others(lifeline_ready=False)
                return value
        finally:
            if self._dropped:
                self._settle_dropped()

    def _wait_for(self, ready: Callable[[], T | None], timeout_s: float, field: str, what: str) -> T:
        deadline = time.monotonic() + timeout_s
        while (value := ready()) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise Timeout(f"waited {timeout_s:g} s for {what}", field=field)
            if self._driving:
                self._changed.wait(remaining_s)
            else:
                self._drive(remaining_s)
        return value

    def drop(self, stream: StreamState) -> None:
        """Cancel a stream that nobody reads any more. The garbage collector calls this, in any thread at any time, so
        it never waits for the lock: whoever holds it now sees to `_dropped` when letting go."""
        self._dropped.append(stream)
        self._settle_dropped()

    def close(self) -> None:
        """Say goodbye and hang up; everything that still waits gets ConnectionLost. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self.core.goodbye()
            transport, self._transport = self._transport, None
            if transport is not None:
                self._forget_filenos(transport)
                transport.close(self.core)
            self.core.abandon_all(ConnectionLost("the client was closed"))
            if self._driving:
                self._wake()
            else:
                self._close_wake_fd()
            self._changed.notify_all()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with self._changed:
                yield
        finally:
            self._settle_dropped()

    # ---- the thread that polls for all

    def _drive(self, limit_s: float) -> None:
        """Move bytes once, waiting for some at most `limit_s`. Called, and returns, with the lock held."""
        self._driving = True
        try:
            self.core.expire(time.monotonic())
            if self._transport is None:
                self._reconnect(limit_s)
            elif not (self.core.has_output and self._pump()):
                self._pump(*(self._poll(limit_s) if self.core.shared.may_sleep() else (True, False)))
        finally:
            self._driving = False
            if self._closed:
                self._close_wake_fd()
            self._changed.notify_all()

    def _poll(self, limit_s: float) -> tuple[bool, bool]:
        """Sleep until something is to be read: whether it is messages, and whether it is the lifeline."""
        self._watch_bell(self.core.shared.bell_fd)
        if self.core.has_detached:
            limit_s = min(limit_s, RETRY_S)

        def sleep() -> list[tuple[int, int]]:
            self._settle_dropped()
            return self._poller.poll(limit_s * 1000 + 1)

        ready = _without(self._changed, sleep)
        self.core.shared.stay_awake()
        fds = [fd for fd, _ in ready]
        if self._bell_fd in fds:
            hush(self._bell_fd)
        if self._wake_fd in fds:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if self._transport is None:
            return False, False
        messages_fd, lifeline_fd = self._transport.filenos
        return messages_fd in fds, lifeline_fd in fds

    def _pump(self, messages_ready: bool = True, lifeline_ready: bool = True) -> bool:
        """True when something came, be it the end of the connection."""
        if self._transport is None:
            return False
        try:
            return self._transport.pump(self.core, messages_ready, lifeline_ready)
        except ProtocolError as error:
            self._lose(ConnectionLost(f"the daemon sent what is no valid message: {error}"))
        except KVPoolError as error:
            self._lose(error)
        except BaseException:  # Ctrl-C between two bytecodes: a message may be half taken in, so begin again
            self._lose(ConnectionLost("interrupted while a message was read"))
            raise
        return True

    def _pump_for_others(self, lifeline_ready: bool = True) -> None:
        """Send; what came meanwhile may be what a polling or sleeping thread waits for."""
        if self._pump(lifeline_ready=lifeline_ready):
            self._changed.notify_all()
            if self._driving:
                self._wake()

    def _make_lock(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def _make_wake_fd(self) -> None:
        try:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise ConnectionLost(f"this process can open nothing: {error.strerror}") from None
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        self._close_wake_fd.atexit = False  # a daemon thread may still poll it

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ---- opening and losing

    def _open(self, timeout_s: float) -> None:
        if self._closed:
            raise ConnectionLost("the client was closed")
        transport = open_transport(self._where.resolve(), timeout_s)
        self._transport = transport
        for fd in (*transport.filenos, self._wake_fd):
            self._poller.register(fd, select.POLLIN)
        transport.greet(self.core)
        if self._driving:
            self._wake()
        self._pump()

    def _lose(self, error: KVPoolError) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            self._forget_filenos(transport)
            transport.close()
        self.core.lost(error, time.monotonic())
        if isinstance(error, OutOfDescriptors):
            with contextlib.suppress(KVPoolError):
                self._open(RETRY_S)

    def _watch_bell(self, fd: int) -> None:
        """The arena's, once there is one; -1: none."""
        if fd != self._bell_fd:
            if self._bell_fd >= 0:
                self._poller.unregister(self._bell_fd)
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)
            self._bell_fd = fd

    def _forget_filenos(self, transport: Transport) -> None:
        self._watch_bell(-1)
        for fd in transport.filenos:
            self._poller.unregister(fd)

    def _reconnect(self, limit_s: float) -> None:
        if not self.core.has_detached:
            raise self.core.last_error or ConnectionLost("not connected")
        pause_s = self._retry_at - time.monotonic()
        if pause_s > 0:
            self._changed.wait(min(limit_s, pause_s))
            return
        self._retry_at = time.monotonic() + RETRY_S
        with contextlib.suppress(KVPoolError):
            self._open(min(limit_s, RETRY_S))

    # ---- streams that nobody holds any more

    def _settle_dropped(self) -> None:
        while self._dropped and self._changed.acquire(blocking=False):
            try:
                while self._dropped:
                    stream = self._dropped.popleft()
                    stream.abandon()
                    self.core.cancel(stream)
                self._pump_for_others()
            finally:
                self._changed.release()

    def _after_fork(self) -> None:
        self._make_lock()
        self._driving = False
        self._poller, self._bell_fd = select.poll(), -1
        self._close_wake_fd()
        self._make_wake_fd()
        if self._transport is not None:
            self._inherited.append(self._transport)
            self._transport = None
        self.core.abandon_all(ConnectionLost("the process that was connected forked this one"))


_release, _acquire = methodcaller("release"), methodcaller("acquire")


def _without(lock: threading.Condition, action: Callable[[], T]) -> T:
    """Do something without the lock. It is held afterwards in any case: also where a signal's handler raises, which can
    happen at the end of every call; so what is done to the lock and the note of it are one call."""
    interrupt: BaseException | None = None
    released: list[None] = []
    acquired: list[bool] = []
    try:
        released.extend(map(_release, (lock,)))
        result = action()
    finally:
        while released and not acquired:
            try:
                acquired.extend(map(_acquire, (lock,)))
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
    return result
