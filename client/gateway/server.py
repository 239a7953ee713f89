"""The gateway's process: where it listens, who may come in, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import stat
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from ..aio import AsyncClient
from ..wire.errors import InvalidArgument, KVPoolError
from .app import Gateway

STOP_TIMEOUT_S = 30.0
GREETING_TIMEOUT_S = 1.0
BACKLOG = 128
MIN_KEY_CHARACTERS = 16
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Listen:
    """A loopback port, or (`socket_path`) a Unix socket."""

    host: str
    port: int
    socket_path: Path | None
    socket_mode: int
    api_key_file: Path | None


def serve(address: str | None, listen: Listen) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. Raises InvalidArgument naming the option that is wrong."""
    api_keys = read_api_keys(listen.api_key_file) if listen.api_key_file is not None else ()
    logging.basicConfig(level=logging.WARNING, format="kvpool gateway: %(message)s")
    with _listening(listen, api_keys) as (sock, shown):
        hosts = None if api_keys or listen.socket_path else {*LOOPBACK_NAMES, listen.host}
        asyncio.run(_serve(address, api_keys, hosts, sock, shown))
    return 0


async def _serve(
    address: str | None, api_keys: tuple[str, ...], hosts: set[str] | None, sock: socket.socket, shown: str
) -> None:
    pool = AsyncClient(address, client_name="kvpool gateway")
    gateway = Gateway(pool, api_keys=api_keys, hosts=hosts)
    runner = web.AppRunner(
        gateway.application(), access_log=None, handler_cancellation=True, shutdown_timeout=STOP_TIMEOUT_S
    )
    await runner.setup()
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        print(f"kvpool gateway: listening at {shown}; {await _greeting(pool)}", flush=True)
        await stop.wait()
        await _first_of(runner.cleanup(), stop_now.wait())
    finally:
        await pool.close()  # what is left of answers ends with it, and their handlers with the loop


async def _greeting(pool: AsyncClient) -> str:
    """Whom it serves, if that can be said at once. It begins without a daemon, too: each request tries again."""
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            return f"the model is {(await pool.connect()).model}"
    except (KVPoolError, TimeoutError) as error:
        why = str(error) or "the daemon does not answer yet"
        return f"it answers 503 until there is a daemon ({why})"


async def _first_of(*choices: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_api_keys(path: Path) -> tuple[str, ...]:
    """One key a line; empty lines and those that begin with # are left out. Raises InvalidArgument."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            keys = tuple(line.strip() for line in file if line.strip() and not line.startswith("#"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot be read: {error}", field="--api-key-file") from None
    if mode & stat.S_IROTH:
        raise InvalidArgument(f"may be read by everybody; chmod 600 {path}", field="--api-key-file")
    if not keys:
        raise InvalidArgument(f"{path} holds no key; write one a line", field="--api-key-file")
    if any(len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() for key in keys):
        raise InvalidArgument(
            f"a key must have at least {MIN_KEY_CHARACTERS} printable ASCII characters", field="--api-key-file"
        )
    return keys


@contextlib.contextmanager
def _listening(listen: Listen, api_keys: tuple[str, ...]) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket, and its address for people."""
    if listen.socket_path is not None:
        with _unix_socket(listen.socket_path, listen.socket_mode) as sock:
            yield sock, f"unix:{listen.socket_path}"
    else:
        with _tcp_socket(listen, api_keys) as sock:
            host, port = sock.getsockname()[:2]
            yield sock, f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _tcp_socket(listen: Listen, api_keys: tuple[str, ...]) -> socket.socket:
    try:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"{listen.host!r} is no address of this machine: {error}", field="--host") from None
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not api_keys:
        raise InvalidArgument(
            f"{listen.host} can be reached from other machines; set --api-key-file, or use 127.0.0.1", field="--host"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except OSError as error:
        sock.close()
        raise InvalidArgument(f"{listen.host}:{listen.port} cannot be used: {error.strerror}", field="--port") from None


@contextlib.contextmanager
def _unix_socket(path: Path, mode: int) -> Iterator[socket.socket]:
    """A socket file that nobody else may use before its mode is set, removed at the end."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            if path.is_socket():
                _remove_if_dead(path)
            before = os.umask(0o777)
            try:
                sock.bind(str(path))
            finally:
                os.umask(before)
            path.chmod(mode)
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be used: {error.strerror or error}", field="--socket") from None
        ours = path.stat().st_ino
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == ours:
                    path.unlink()


def _remove_if_dead(path: Path) -> None:
    """A file that a killed gateway left behind. Raises InvalidArgument where somebody answers."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise InvalidArgument(f"{path} is served by another process", field="--socket")
