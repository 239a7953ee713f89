"""The daemon's address: a lock, two Unix sockets with deliberate permissions, and nothing left behind.

Beside the socket PATH of the messages lie PATH.life (lifelines) and PATH.lock. The lock is taken first, because a
second bind of the same path would succeed and steal it.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ...client.address import MAX_PATH_BYTES
from ...client.lifeline import LIFELINE_SUFFIX
from ..settings.config import Config
from ..settings.options import ConfigError
from ..system.gate import Gate
from .remote import Remote, open_remote

LOCK_SUFFIX = ".lock"
BACKLOG = 1024


def socket_path(address: str, environ: Mapping[str, str]) -> Path:
    """Where the message socket lies; auto: the manager's runtime directory, else the system's or the user's."""
    if address == "auto":
        if environ.get("RUNTIME_DIRECTORY"):
            path = Path(environ["RUNTIME_DIRECTORY"].split(":")[0]) / "kvpool.sock"
        elif os.geteuid() == 0 or not environ.get("XDG_RUNTIME_DIR"):
            path = Path("/run/kvpool/kvpool.sock")
        else:
            path = Path(environ["XDG_RUNTIME_DIR"]) / "kvpool" / "kvpool.sock"
    else:
        path = Path(address.removeprefix("ipc://"))
    if not path.is_absolute():
        raise ConfigError(f"address: {address!r} cannot be used; set it to an absolute path, or ipc:// and one")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"address: {path} is longer than {MAX_PATH_BYTES} bytes; set a shorter one")
    return path


@dataclass(slots=True)
class Endpoint:
    """Everything that lies in the file system while the daemon runs. `close` removes it."""

    path: Path
    context: zmq.Context[zmq.Socket[bytes]]
    router: zmq.Socket[bytes]
    gate: Gate  # where the router accepts, once it is opened; until then connections wait
    lifelines: socket.socket  # listening
    remote: Remote | None  # for clients of other machines
    _lock: Lock
    _inherited: bool = False
    _closed: bool = field(default=False)

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued for at most `linger_s`, then remove sockets and lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.gate.close()
        self.router.close(linger=int(linger_s * 1000))
        if self.remote is not None:
            self.remote.close(int(linger_s * 1000))
        self.context.term()
        self.gate.listener.close()
        self.lifelines.close()
        if not self._inherited:
            for path in (self.path, _beside(self.path, LIFELINE_SUFFIX)):
                path.unlink(missing_ok=True)
        self._lock.release()


def open_endpoint(config: Config, path: Path, inherited: Sequence[int] = ()) -> Endpoint:
    """Lock, then bind (or take over the manager's two sockets). Raises ConfigError saying what is in the way."""
    _make_directory(path.parent)
    lock = Lock.take(_beside(path, LOCK_SUFFIX))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    remote: Remote | None = None
    try:
        if config.tcp_address:
            remote = open_remote(config, context, _router(context, config), path)
        router = _router(context, config)
        messages, lifelines = _adopt(path, inherited) if inherited else _bind(path, config)
        gate = Gate(router, f"ipc://{path}", messages, path)
        return Endpoint(path, context, router, gate, lifelines, remote, lock, bool(inherited))
    except BaseException:
        if remote is not None:
            remote.close(0)
        context.destroy(linger=0)
        lock.release()
        raise


def _router(context: zmq.Context[zmq.Socket[bytes]], config: Config) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tell us when a peer is slow (EAGAIN) or gone (EHOSTUNREACH)
    router.setsockopt(zmq.ROUTER_HANDOVER, 0)  # nobody may take over the name of a live session
    router.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
    router.setsockopt(zmq.RCVHWM, 256)  # per peer; what is behind waits in the peer
    router.setsockopt(zmq.SNDHWM, 256)
    router.setsockopt(zmq.LINGER, 0)
    return router


def _bind(path: Path, config: Config) -> tuple[socket.socket, socket.socket]:
    """Sockets that listen for messages and for lifelines."""
    gid = group_id(config.socket_group)
    life = _beside(path, LIFELINE_SUFFIX)
    for stale in (path, life):
        remove_stale(stale)
    listeners = []
    before = os.umask(0o177)  # born closed, opened on purpose below
    try:
        for made in (path, life):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            listeners.append(listener)
            listener.bind(str(made))
            listener.listen(BACKLOG)
            if gid is not None:
                os.chown(made, -1, gid)
            made.chmod(config.socket_mode)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(f"address: {path}: {error.strerror}; set address to a path that can be written") from None
    finally:
        os.umask(before)
    return listeners[0], listeners[1]


def _adopt(path: Path, inherited: Sequence[int]) -> tuple[socket.socket, socket.socket]:
    """The manager's sockets, told apart by their paths."""
    by_name = {}
    for fd in inherited:
        with socket.socket(fileno=os.dup(fd)) as probe:
            by_name[probe.getsockname()] = fd
    life = str(_beside(path, LIFELINE_SUFFIX))
    if set(by_name) != {str(path), life}:
        raise ConfigError(f"address: the manager passed {sorted(by_name)}; let it listen on {path} and {life}")
    lifelines = socket.socket(fileno=by_name[life])
    lifelines.setblocking(False)
    return socket.socket(fileno=by_name[str(path)]), lifelines


@dataclass(slots=True)
class Lock:
    """An advisory lock on a file that holds its owner's pid. The kernel lets go of it however the owner ends."""

    path: Path
    _fd: int

    @classmethod
    def take(cls, path: Path) -> Lock:
        """Raises ConfigError naming the pid of whoever holds it."""
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                raise ConfigError(
                    f"address: {path}: {error.strerror}; set address to a path that can be written"
                ) from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                served = path.with_suffix("")
                raise ConfigError(
                    f"another kvpoold (pid {holder}) serves {served}; stop it, or set address to another path"
                ) from None
            # The holder before us may have removed the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    os.truncate(fd, 0)
                    os.write(fd, f"{os.getpid()}\n".encode())
                    return cls(path, fd)
            os.close(fd)

    def release(self) -> None:
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"address: {directory}: {error.strerror}; set address to a path that can be written"
        ) from None


def remove_stale(path: Path) -> None:
    """A socket that a killed daemon left; the lock proves that nobody serves it. Anything else stays untouched."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"address: {path} exists and is not a socket; remove it, or set address to another path")
        path.unlink()


def group_id(name: str) -> int | None:
    """Of a group's name or number; None: none is wished for. Raises ConfigError."""
    if not name:
        return None
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: there is no group {name!r}; set one that exists") from None
