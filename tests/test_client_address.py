"""Where a client looks for its daemon, and the lifeline's two ends."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from kvpool.client.address import MAX_PATH_BYTES, parse_address, resolve_address
from kvpool.client.lifeline import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    PeerCredentials,
    connect_lifeline,
    encode_frame,
    peer_credentials,
)
from kvpool.client.wire.errors import ConnectionLost, InvalidArgument, ProtocolError


@pytest.mark.parametrize("text", ["/run/x.sock", "ipc:///run/x.sock"])
def test_addresses_are_paths(text: str) -> None:
    address = parse_address(text)
    assert address.path == Path("/run/x.sock")
    assert address.endpoint == "ipc:///run/x.sock"
    assert address.lifeline_path == Path("/run/x.sock.life")


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:1", "x.sock", "ipc://x", "/" + "x" * MAX_PATH_BYTES])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_address(text)
    assert caught.value.field == "address"


def test_the_longest_path_can_be_bound() -> None:
    """Both paths, so that the limit is not one too high."""
    with tempfile.TemporaryDirectory() as directory:
        name = "x" * (MAX_PATH_BYTES - len(directory) - 1)
        address = parse_address(f"{directory}/{name}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address.lifeline_path))


def test_the_first_that_exists_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system.sock"
    monkeypatch.setattr("kvpool.client.address.SYSTEM_SOCKET", system)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(ConnectionLost, match="KVPOOL_ADDRESS"):
        resolve_address(None, environ)
    system.touch()
    assert resolve_address(None, environ).path == system
    own = tmp_path / "kvpool" / "kvpool.sock"
    own.parent.mkdir()
    own.touch()
    assert resolve_address(None, environ).path == own
    assert resolve_address(None, {**environ, "KVPOOL_ADDRESS": "/named"}).path == Path("/named")
    assert resolve_address("/asked", {**environ, "KVPOOL_ADDRESS": "/named"}).path == Path("/asked")


def test_frames_survive() -> None:
    reader = FrameReader()
    assert reader.feed(encode_frame(FrameKind.ATTACHED) + encode_frame(FrameKind.REFUSED, b"why")) == [
        Frame(FrameKind.ATTACHED),
        Frame(FrameKind.REFUSED, b"why"),
    ]


@pytest.mark.parametrize(
    "data", [b"GET / HT", b"KVL1\xff\x00\x00\x00", b"KVL1\x01\x00\xff\xff", encode_frame(FrameKind.TOKEN)[1:] + b"KVL1"]
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(data)


def test_payloads_are_bounded() -> None:
    with pytest.raises(ValueError, match="4096"):
        encode_frame(FrameKind.TOKEN, b"x" * (MAX_PAYLOAD_BYTES + 1))


def test_the_kernel_says_who_connected(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x.life"))
        listener.listen()
        with connect_lifeline(tmp_path / "x.life", 1.0) as client, listener.accept()[0] as server:
            assert peer_credentials(server) == PeerCredentials(os.getpid(), os.getuid(), os.getgid())
            assert not client.getblocking()


@pytest.mark.skipif(os.getuid() == 0, reason="root may connect to everything")
def test_a_closed_socket_says_what_to_ask_for(tmp_path: Path) -> None:
    path = tmp_path / "x.sock.life"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0)
        with pytest.raises(ConnectionLost, match="group"):
            connect_lifeline(path, 1.0)
