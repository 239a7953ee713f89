"""Clients of other machines: a second router on a tcp port, encrypted, for those whose keys are known.

ZeroMQ's own thread does the handshake and asks whether a key is known (ZAP, RFC 27), over a socket that the loop
answers. Every message then carries the key of its connection, so who a client is never depends on what it writes.
ZeroMQ's heartbeats stand in for the lifeline: a connection whose other end does not answer them is closed, and what the
router tells of closed connections is confirmed before a session ends.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import zmq
from zmq.utils import z85

from ...client.address import parse_tcp
from ..settings.config import Config
from ..settings.options import ConfigError
from ..system.gate import Gate
from .keyring import ANYBODY, Keyring, load_keyring
from .sessions import Peer

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, key
HANDSHAKE_MS = 5000
BEATS_IN_TIMEOUT = 3
BACKLOG = 128


class Remote:
    """The router for other machines, and who may use it. Poll `filenos`."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        zap: zmq.Socket[bytes],
        listener: socket.socket,
        path: Path,
        keyring: Keyring,
    ) -> None:
        host, port, *_ = listener.getsockname()
        self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.router = router
        self.keyring = keyring
        self.gate = Gate(router, self.endpoint, listener, path, notes_ends=True)
        self._zap = zap
        self._connections: dict[bytes, int] = {}  # descriptor by routing id
        self.router_fd, self.zap_fd = int(router.getsockopt(zmq.FD)), int(zap.getsockopt(zmq.FD))

    def answer_questions(self) -> None:
        """Tell ZeroMQ which keys are known."""
        while int(self._zap.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = self._zap.recv_multipart()
            key = z85.encode(frames[6]) if len(frames) == ZAP_FRAMES and len(frames[6]) == 32 else b""
            known = frames[0] == ZAP_VERSION and frames[5] == b"CURVE" and key in self.keyring.users
            status = [b"200", b"OK", key] if known else [b"400", b"this key is not authorised", b""]
            self._zap.send_multipart([ZAP_VERSION, frames[1], *status, b""])

    def peer_of(self, routing_id: bytes, frame: zmq.Frame) -> Peer | None:
        """Whose message this is; None: its key is no longer known."""
        if routing_id not in self._connections:
            self._connections[routing_id] = int(frame.get(zmq.SRCFD))
        user = ANYBODY
        if self.keyring.own is not None:
            known = self.keyring.users.get(str(frame.get("User-Id")).encode())
            if known is None:
                return None
            user = known
        return Peer(user.uid, user.gid, 0, user)

    def perhaps_gone(self) -> list[bytes]:
        """Routing ids over whose connections nothing may come any more. To be asked for after `gate.is_short`."""
        hung_up = set(self.gate.take_hung_up())
        gone = [routing_id for routing_id, fd in self._connections.items() if fd in hung_up]
        for routing_id in gone:
            del self._connections[routing_id]
        return gone

    def close(self, linger_ms: int) -> None:
        self.gate.close()
        self.router.close(linger=linger_ms)
        self._zap.close(linger=0)
        self.gate.listener.close()


def open_remote(
    config: Config, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], path: Path
) -> Remote:
    """`router`: not bound yet. Raises ConfigError saying what is in the way."""
    keyring = load_keyring(config)
    listener = _listen(config.tcp_address)
    zap = context.socket(zmq.REP)
    try:
        zap.bind(ZAP_ENDPOINT)
        beat_ms = int(1000 * config.remote_timeout_s / BEATS_IN_TIMEOUT)
        for option, value in {
            zmq.IPV6: 1,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: beat_ms,
            zmq.HEARTBEAT_TIMEOUT: beat_ms * (BEATS_IN_TIMEOUT - 1),
        }.items():
            router.setsockopt(option, value)
        if keyring.own is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, keyring.own.secret)
            router.setsockopt(zmq.ZAP_DOMAIN, b"kvpool")
        return Remote(router, zap, listener, path, keyring)
    except BaseException:
        zap.close(linger=0)
        listener.close()
        raise


def _listen(address: str) -> socket.socket:
    parts = parse_tcp(address)
    if parts is None:
        raise ConfigError(f"tcp_address: {address!r} cannot be used; set it to tcp://HOST:PORT")
    try:
        family, _, _, _, found = socket.getaddrinfo(*parts, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(found, family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"tcp_address: {address}: {why}; set a host and port of this machine that are free") from None
    listener.setblocking(False)
    return listener
