"""Where figures are read: as much of HTTP as a scraper needs, in the daemon's loop, and nothing that could hold it up.

A connection brings one request and takes one answer. The answer is handed to the kernel in one piece: a reader that
leaves it there costs nothing, and one for which there is no room is hung up on. Pages are rendered at most once a
second, so whoever asks more often gets the same bytes again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ...client.lifeline import peer_credentials
from ..settings.config import Config
from ..settings.options import ConfigError, split_loopback
from ..system.timers import Timers
from .clients import Clients
from .endpoint import group_id, remove_stale
from .health import health_of
from .sessions import Peer

MAX_CONNECTIONS = 16
"""The oldest goes when one more comes, so that silent ones keep nobody out."""

MAX_REQUEST_BYTES = 8192
SEND_BUFFER_BYTES = 1 << 20
PATIENCE_S = 5.0
FRESH_S = 1.0
OUT_OF_DESCRIPTORS_PAUSE_S = 0.5

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Page(NamedTuple):
    """An answer."""

    status: int
    content_type: str
    body: bytes


PLAIN = "text/plain; charset=utf-8"
Render = Callable[[bool], Page]
"""Makes a page; the argument says whether its reader is an administrator."""


class Connection(NamedTuple):
    stream: socket.socket
    is_admin: bool
    due: float  # monotonic seconds; hung up then
    received: bytearray


class Scrapes:
    """The listening socket and its connections. The loop calls `handle` with what is readable of `fd in scrapes`."""

    def __init__(
        self,
        listener: socket.socket,
        pages: Mapping[str, Render],
        timers: Timers,
        *,
        is_admin: Callable[[Peer], bool],
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._listener = listener
        self._pages = pages
        self._timers = timers
        self._is_admin = is_admin
        self._watch = watch
        self._unwatch = unwatch
        self._connections: dict[int, Connection] = {}  # by descriptor, oldest first
        self._rendered: dict[tuple[str, bool], tuple[float, Page]] = {}
        self._sweeping = False
        watch(listener.fileno())

    def __contains__(self, fd: int) -> bool:
        return fd in self._connections or fd == self._listener.fileno()

    def handle(self, fd: int) -> None:
        """Take what came: a connection, or a part of a request."""
        if fd == self._listener.fileno():
            self._accept()
        else:
            self._read(self._connections[fd])

    def close(self) -> None:
        """Hang up, and leave nothing behind."""
        for connection in list(self._connections.values()):
            self._hang_up(connection)
        if self._listener.family == socket.AF_UNIX:
            Path(self._listener.getsockname()).unlink(missing_ok=True)
        self._listener.close()

    def _accept(self) -> None:
        """One connection; others are taken in the next turns."""
        now = time.monotonic()
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: let the backlog wait
            self._unwatch(self._listener.fileno())
            self._timers.at(now + OUT_OF_DESCRIPTORS_PAUSE_S, lambda: self._watch(self._listener.fileno()))
            return
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._hang_up(next(iter(self._connections.values())))
        connection = Connection(stream, self._may_see_users(stream), now + PATIENCE_S, bytearray())
        self._connections[stream.fileno()] = connection
        self._watch(stream.fileno())
        if not self._sweeping:
            self._sweeping = True
            self._timers.at(connection.due, self._sweep)

    def _may_see_users(self, stream: socket.socket) -> bool:
        """On a port nobody knows who asks."""
        if stream.family != socket.AF_UNIX:
            return False
        credentials = peer_credentials(stream)
        return self._is_admin(Peer(credentials.uid, credentials.gid, credentials.pid))

    def _sweep(self) -> None:
        """Hang up on those whose request did not come in time."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.due <= now:
                self._hang_up(connection)
        self._sweeping = bool(self._connections)
        if self._sweeping:
            self._timers.at(next(iter(self._connections.values())).due, self._sweep)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.stream.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received.extend(data)
        if b"\r\n\r\n" in connection.received or b"\n\n" in connection.received:
            self._answer(connection)
        elif not data or len(connection.received) > MAX_REQUEST_BYTES:
            self._hang_up(connection)

    def _answer(self, connection: Connection) -> None:
        page = self._page(bytes(connection.received).split(b"\n", 1)[0].decode("latin-1"), connection.is_admin)
        head = (
            f"HTTP/1.1 {page.status} {REASONS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            connection.stream.send(head.encode() + page.body, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            connection.stream.shutdown(socket.SHUT_WR)
        self._hang_up(connection)

    def _page(self, request_line: str, is_admin: bool) -> Page:
        words = request_line.split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Page(400, PLAIN, b"this is not HTTP/1.1\n")
        path = words[1].split("?", 1)[0]
        if words[0] != "GET":
            return Page(405, PLAIN, b"only GET is served\n")
        if path not in self._pages:
            return Page(404, PLAIN, f"there are {' and '.join(self._pages)}\n".encode())
        now = time.monotonic()
        at, page = self._rendered.get((path, is_admin), (0.0, None))
        if page is None or now - at >= FRESH_S:
            page = self._pages[path](is_admin)
            self._rendered[path, is_admin] = now, page
        return page

    def _hang_up(self, connection: Connection) -> None:
        if self._connections.pop(connection.stream.fileno(), None) is not None:
            self._unwatch(connection.stream.fileno())
            connection.stream.close()


def health_page(clients: Clients) -> Page:
    """200 while steps finish, 503 and the reason while they do not."""
    healthy, reason = health_of(clients.engine, clients.config.health_limit_s, clients.now)
    return Page(200 if healthy else 503, PLAIN, f"{reason or 'healthy'}\n".encode())


def open_listener(config: Config) -> socket.socket:
    """Listen at `metrics_address`. Raises ConfigError saying what is in the way."""
    loopback = split_loopback(config.metrics_address)
    try:
        listener = _listen_at_port(*loopback) if loopback else _listen_at_path(Path(config.metrics_address), config)
    except OSError as error:
        raise ConfigError(
            f"metrics_address: {config.metrics_address}: {error.strerror or error}; "
            f"set it to a path or a loopback port that is free"
        ) from None
    listener.setblocking(False)
    return listener


def _listen_at_port(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _listen_at_path(path: Path, config: Config) -> socket.socket:
    """With the permissions of the daemon's other sockets."""
    gid = group_id(config.socket_group)
    if _is_served(path):
        raise ConfigError(f"metrics_address: {path} is served by another process; set another path")
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # born closed, opened on purpose below
    try:
        listener.bind(str(path))
        listener.listen()
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(config.socket_mode)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
    return True
