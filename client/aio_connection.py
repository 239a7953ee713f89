"""The connection of the asyncio client: the event loop watches the sockets, nothing else runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from .address import Whereabouts
from .arena.bell import hush
from .arena.descriptors import OutOfDescriptors
from .connection import RETRY_S
from .core import Core, State
from .stream_state import StreamState
from .transport import Transport, open_transport
from .wire.errors import ConnectionLost, KVPoolError, ProtocolError, Timeout
from .wire.messages import Welcome

T = TypeVar("T")


class AsyncConnection:
    """Owns the core and the transport; the event loop calls it when a socket has something."""

    def __init__(
        self, where: Whereabouts, timeout_s: float, client_name: str, reconnect_s: float = 0.0, *, arena: bool = True
    ) -> None:
        self.timeout_s = timeout_s
        self.core = Core(client_name, reconnect_s=reconnect_s, patience_s=timeout_s, arena=arena)
        self._where = where
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: Transport | None = None
        self._bell_fd = -1  # that the loop watches
        self._state_changed = asyncio.Event()
        self._reattaching: asyncio.Task[None] | None = None
        self._closed = False
        self.core.on_change = self._state_changed.set

    async def connect(self) -> Welcome:
        """Return, once the session is ready, whose it is. Raises ConnectionLost, or Timeout naming timeout_s."""
        self.pump()  # the loop may not have run for a while: the daemon may be another one by now
        if self.core.state is State.DISCONNECTED:
            self._open()
        return await self.wait(
            self._state_changed,
            self._ready,
            self.timeout_s,
            "timeout_s",
            "the daemon's welcome (it may still be loading its model)",
        )

    def _ready(self) -> Welcome | None:
        if self.core.state is State.DISCONNECTED:
            raise self.core.last_error or ConnectionLost("not connected")
        return self.core.welcome if self.core.state is State.READY else None

    async def wait(
        self, changed: asyncio.Event, ready: Callable[[], T | None], timeout_s: float, field: str, what: str
    ) -> T:
        """The first value that `ready` returns, or what it raises; looked at whenever `changed` is set."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed.clear()
                    value = ready()
                    self.flush()
                    if value is not None:
                        return value
                    await changed.wait()
        except TimeoutError as error:
            if isinstance(error, KVPoolError):
                raise
            raise Timeout(f"waited {timeout_s:g} s for {what}", field=field) from None

    def pump(self) -> None:
        """Send what waits and take in what came; whoever it concerns is woken."""
        if self._transport is None:
            return
        try:
            self._transport.pump(self.core)
        except ProtocolError as error:
            self._lose(ConnectionLost(f"the daemon sent what is no valid message: {error}"))
        except KVPoolError as error:
            self._lose(error)
        else:
            self._watch_bell(self.core.shared.bell_fd)

    def _rung(self) -> None:
        hush(self._bell_fd)
        self.pump()

    def _watch_bell(self, fd: int) -> None:
        """The arena's, once there is one; -1: none."""
        if fd != self._bell_fd and self._loop is not None:
            if self._bell_fd >= 0:
                self._loop.remove_reader(self._bell_fd)
            if fd >= 0:
                self._loop.add_reader(fd, self._rung)
            self._bell_fd = fd

    def flush(self) -> None:
        """Send what waits, if anything does."""
        if self.core.has_output:
            self.pump()

    def drop(self, stream: StreamState) -> None:
        """Cancel a stream that nobody reads any more. The garbage collector calls this, in any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, stream)

    def _cancel(self, stream: StreamState) -> None:
        stream.abandon()
        self.core.cancel(stream)
        self.flush()

    def close(self) -> None:
        """Say goodbye and hang up; everything that still waits gets ConnectionLost. Idempotent."""
        self._closed = True
        if self._reattaching is not None:
            self._reattaching.cancel()
        self.core.goodbye()
        self._hang_up(self.core)
        self.core.abandon_all(ConnectionLost("the client was closed"))

    def _open(self) -> None:
        if self._closed:
            raise ConnectionLost("the client was closed")
        transport = open_transport(self._where.resolve(), RETRY_S)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        for fd in transport.filenos:
            self._loop.add_reader(fd, self.pump)
        transport.greet(self.core)
        self.pump()

    def _hang_up(self, core: Core | None = None) -> None:
        transport, self._transport = self._transport, None
        self._watch_bell(-1)
        if transport is not None and self._loop is not None:
            for fd in transport.filenos:
                self._loop.remove_reader(fd)
            transport.close(core)

    def _lose(self, error: KVPoolError) -> None:
        self._hang_up()
        self.core.lost(error, time.monotonic())
        if isinstance(error, OutOfDescriptors):
            with contextlib.suppress(KVPoolError):
                self._open()
        if self.core.has_detached and self._reattaching is None and self._loop is not None:
            self._reattaching = self._loop.create_task(self._reattach())

    async def _reattach(self) -> None:
        """Try again and again for the requests that wait, until none is left."""
        try:
            while self.core.has_detached:
                self.core.expire(time.monotonic())
                if self.core.has_detached and self.core.state is State.DISCONNECTED:
                    with contextlib.suppress(KVPoolError):
                        self._open()
                await asyncio.sleep(RETRY_S)
        finally:
            self._reattaching = None
