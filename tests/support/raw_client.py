"""The wire spoken by hand: a client that may say anything, at any time, or stop reading."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, TypeVar

import zmq

from kvpool.client.lifeline import LIFELINE_SUFFIX, FrameKind, FrameReader, encode_frame
from kvpool.client.wire.protocol import (
    ClientMessage,
    DaemonMessage,
    Failed,
    Hello,
    Welcome,
    decode_daemon_message,
    encode,
)

M = TypeVar("M")


class RawClient:
    """A DEALER and, once asked for, a lifeline. `with RawClient(path) as raw:`"""

    def __init__(self, path: object, *, receive_hwm: int = 1000) -> None:
        self.path = str(path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.setsockopt(zmq.RCVHWM, receive_hwm)
        self.dealer.connect(f"ipc://{self.path}")
        self.lifeline: socket.socket | None = None

    def send(self, message: ClientMessage | bytes | list[bytes]) -> None:
        if isinstance(message, list):
            self.dealer.send_multipart(message)
        else:
            self.dealer.send(message if isinstance(message, bytes) else encode(message))

    def receive(self, timeout_s: float = 10.0) -> DaemonMessage:
        if not self.dealer.poll(int(timeout_s * 1000)):
            raise TimeoutError("the daemon said nothing")
        return decode_daemon_message(self.dealer.recv())

    def ask(self, message: ClientMessage | bytes | list[bytes]) -> DaemonMessage:
        self.send(message)
        return self.receive()

    def expect(self, kind: type[M], timeout_s: float = 10.0) -> M:
        """The next message of a kind; others are passed over, but for Failed."""
        while not isinstance(message := self.receive(timeout_s), kind):
            if isinstance(message, Failed):
                raise AssertionError(message)
        return message

    def refused(self, message: ClientMessage | bytes | list[bytes]) -> Failed:
        """Send what must be refused."""
        self.send(message)
        while not isinstance(answer := self.receive(), Failed):
            pass
        return answer

    def hello(self) -> Welcome:
        self.send(Hello((1,), "raw"))
        return self.expect(Welcome)

    def open(self) -> Welcome:
        """Hello, and the lifeline that proves us alive."""
        welcome = self.hello()
        if (answer := self.tie(welcome.lifeline_token)) is not FrameKind.ATTACHED:
            raise AssertionError(f"the daemon answers the token with {answer}")
        return welcome

    def tie(self, token: bytes) -> FrameKind | None:
        """Offer a token on a new lifeline; what the daemon says to it, None if it hangs up."""
        self.lifeline = self.connect_lifeline()
        self.lifeline.sendall(encode_frame(FrameKind.TOKEN, token))
        return next((frame.kind for frame in self._frames(self.lifeline)), None)

    def connect_lifeline(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(10.0)
        stream.connect(self.path + LIFELINE_SUFFIX)
        return stream

    @staticmethod
    def _frames(stream: socket.socket) -> Iterator[Any]:
        reader = FrameReader()
        while data := stream.recv(4096):
            yield from reader.feed(data)

    def hung_up(self, timeout_s: float = 5.0) -> bool:
        """Whether the daemon ends our lifeline."""
        assert self.lifeline is not None
        self.lifeline.settimeout(timeout_s)
        with contextlib.suppress(ConnectionResetError):
            return self.lifeline.recv(4096) == b""
        return True

    def close(self) -> None:
        if self.lifeline is not None:
            self.lifeline.close()
        self.dealer.close()
        self._context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
