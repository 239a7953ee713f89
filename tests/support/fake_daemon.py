"""A daemon without an engine: the real sockets, and answers that a test writes.

It runs in a thread, or (`start_process`) in a process of its own that a test can kill. A script is a
function called with each message of a client; what it does through `Peer` goes to that client.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import zmq

from kvpool.client.lifeline import FrameKind, FrameReader, encode_frame
from kvpool.client.wire.protocol import (
    Accepted,
    ClientMessage,
    Failed,
    Finished,
    Hello,
    Reply,
    ServerLimits,
    Submit,
    TokenBatch,
    Tokens,
    Usage,
    Welcome,
    decode_client_message,
    encode,
)

LIMITS = ServerLimits(
    max_message_bytes=1 << 20, max_model_len=4096, vocab_size=1000, block_size=16, num_blocks=64, max_num_seqs=8
)

Script = Callable[["Peer", ClientMessage], None]


class Peer:
    """One client, as a script sees it."""

    def __init__(self, daemon: FakeDaemon, identity: bytes) -> None:
        self.identity = identity
        self.token = secrets.token_bytes(32)
        self.lifeline: socket.socket | None = None
        self._daemon = daemon

    @property
    def epoch(self) -> int:
        return self._daemon.epoch

    def send(self, message: Any) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._daemon.router.send_multipart([self.identity, data])

    def accept(self, request_id: str) -> None:
        self.send(Accepted(self.epoch, request_id))

    def tokens(self, request_id: str, index: int, token_ids: list[int], sample: int = 0, **lists: Any) -> None:
        lists.setdefault("texts", tuple(f" t{token_id}" for token_id in token_ids))
        self.send(Tokens(self.epoch, (TokenBatch(request_id, sample, index, tuple(token_ids), **lists),)))

    def finish(self, request_id: str, reason: str = "length", sample: int = 0, **fields: Any) -> None:
        self.send(Finished(self.epoch, request_id, sample, reason, fields.pop("usage", Usage(3, 2, 0)), **fields))

    def hang_up(self) -> None:
        if self.lifeline is not None:
            self.lifeline.close()
            self.lifeline = None


class FakeDaemon:
    """Use as a context manager. `received` holds every message of every client, in order."""

    def __init__(self, path: Path, script: Script, epoch: int = 1, limits: ServerLimits = LIMITS) -> None:
        self.path = path
        self.epoch = epoch
        self.limits = limits
        self.received: list[ClientMessage] = []
        self.peers: dict[bytes, Peer] = {}
        self._script = script
        self._arrived = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stop = False
        self._lifelines: dict[int, tuple[socket.socket, FrameReader]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def __enter__(self) -> FakeDaemon:
        self.open()
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(10)
        os.close(self._wake_fd)

    def open(self) -> None:
        self.path.unlink(missing_ok=True)
        life = self.path.with_name(self.path.name + ".life")
        life.unlink(missing_ok=True)
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.SNDHWM, 0)
        self.router.bind(f"ipc://{self.path}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(life))
        self._listener.listen(64)

    def wait_for(self, condition: Callable[[list[ClientMessage]], Any], timeout_s: float = 10.0) -> Any:
        """Block until the messages received so far satisfy `condition`, and return what it said."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: condition(self.received), timeout_s):
                raise AssertionError(f"never came; received {self.received}")
            return condition(self.received)

    def wait_for_type(self, kind: type[Any]) -> Any:
        return self.wait_for(lambda messages: next((m for m in messages if isinstance(m, kind)), None))

    def wait_for_hang_up(self, timeout_s: float = 5.0) -> None:
        """Block until no client holds a lifeline."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: not self._lifelines, timeout_s):
                raise AssertionError(f"{len(self._lifelines)} lifelines still open")

    def do(self, action: Callable[[Peer], None]) -> None:
        """Let the daemon's thread call `action` with its newest client."""
        self._commands.append(lambda: action(list(self.peers.values())[-1]))
        os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        poller = zmq.Poller()
        for source in (self.router, self._listener.fileno(), self._wake_fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._stop:
                ready = dict(poller.poll())
                if self._listener.fileno() in ready:
                    connection, _ = self._listener.accept()
                    self._lifelines[connection.fileno()] = (connection, FrameReader())
                    poller.register(connection.fileno(), zmq.POLLIN)
                for fd in [fd for fd in ready if fd in self._lifelines]:
                    if not self._read_lifeline(fd):
                        poller.unregister(fd)
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    while self._commands:
                        self._commands.pop(0)()
                if self.router in ready:
                    self._read_message()
        finally:
            self.close()

    def _read_lifeline(self, fd: int) -> bool:
        connection, frames = self._lifelines[fd]
        data = connection.recv(4096) if connection.fileno() >= 0 else b""
        for frame in frames.feed(data):
            peer = next((peer for peer in self.peers.values() if peer.token == frame.payload), None)
            if peer is not None:
                peer.lifeline = connection
                connection.sendall(encode_frame(FrameKind.ATTACHED))
            else:
                connection.sendall(encode_frame(FrameKind.REFUSED, b"unknown token"))
        if not data:
            connection.close()
            with self._arrived:
                del self._lifelines[fd]
                self._arrived.notify_all()
        return bool(data)

    def _read_message(self) -> None:
        identity, data = self.router.recv_multipart()
        message = decode_client_message(data)
        if isinstance(message, Hello):
            peer = self.peers[identity] = Peer(self, identity)
            peer.send(Welcome(self.epoch, 1, f"s{len(self.peers)}", "fake", self.limits, peer.token))
        with self._arrived:
            self.received.append(message)
            self._arrived.notify_all()
        self._script(self.peers[identity], message)

    def close(self) -> None:
        for connection, _ in self._lifelines.values():
            connection.close()
        self._listener.close()
        self.router.close()
        self._context.term()


def silent(peer: Peer, message: ClientMessage) -> None:
    """Answers nothing but Hello."""


def count_up(peer: Peer, message: ClientMessage) -> None:
    """Generates 0, 1, 2, ... up to max_tokens, two to a message; answers every call with its method's name."""
    if isinstance(message, Submit):
        limit = int((message.params or {}).get("max_tokens", 16))
        peer.accept(message.request_id)
        for index in range(0, limit, 2):
            peer.tokens(message.request_id, index, list(range(index, min(index + 2, limit))))
        peer.finish(message.request_id, usage=Usage(3, limit, 1))
    elif hasattr(message, "call_id"):
        peer.send(Reply(peer.epoch, message.call_id, {"method": getattr(message, "method", ""), "num_tokens": 1}))


def refuse(code: str, **fields: Any) -> Script:
    """Refuses every request and call with one code."""

    def script(peer: Peer, message: ClientMessage) -> None:
        request_id, call_id = getattr(message, "request_id", None), getattr(message, "call_id", None)
        if request_id is not None or call_id is not None:
            peer.send(Failed(peer.epoch, code, f"refused: {code}", request_id=request_id, call_id=call_id, **fields))

    return script


def trickle(peer: Peer, message: ClientMessage) -> None:
    """Gives one token of every request, and then nothing for ever."""
    if isinstance(message, Submit):
        peer.accept(message.request_id)
        peer.tokens(message.request_id, 0, [7])


def start_process(path: Path, script: Script) -> ForkProcess:
    """A daemon in a process of its own, ready, to be killed by the caller."""
    multiprocessing = get_context("fork")
    ready = multiprocessing.Event()

    def serve() -> None:
        daemon = FakeDaemon(path, script)
        daemon.open()
        ready.set()
        daemon.run()

    process = multiprocessing.Process(target=serve, daemon=True)
    process.start()
    if not ready.wait(10):
        raise AssertionError("the scripted daemon did not start")
    return process
