"""Peers of the version before, as they were recorded, and of versions that nobody knows yet."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvpool.client.core import Core, State
from kvpool.client.wire.errors import ProtocolError, Unsupported
from kvpool.client.wire.protocol import (
    CLIENT_MESSAGES,
    DAEMON_MESSAGES,
    PROTOCOL_VERSION,
    SUPPORTED_VERSIONS,
    ChatMessage,
    CloseSequence,
    ErrorInfo,
    Failed,
    ServerLimits,
    TokenBatch,
    Usage,
    Welcome,
    decode_client_message,
    decode_daemon_message,
    encode,
    negotiate,
)
from kvpool.client.wire.schema import record_of
from tests.support.arena_rig import SELF, Rig
from tests.support.wire_samples import LAST_VERSION, recorded

FIELDS: dict[str, list[str]] = json.loads((LAST_VERSION / "fields.json").read_text())
NAMES = sorted(path.stem for path in LAST_VERSION.glob("*.hex") if not path.stem.startswith("lifeline"))
PARTS = (ChatMessage, ServerLimits, TokenBatch, Usage, ErrorInfo)
NAME = b"old"


def type_of(data: bytes) -> str:
    kind = msgpack.unpackb(data)["type"]
    assert isinstance(kind, str)
    return kind


@dataclass
class OldPeer:
    """A connection of the rig that speaks in recorded bytes."""

    rig: Rig
    inbox: deque[bytes] = field(default_factory=deque)
    error: Exception | None = None
    full: bool = False

    def say(self, data: bytes) -> list[bytes]:
        self.rig.clients.receive(NAME, SELF, data)
        return self.take()

    def take(self) -> list[bytes]:
        answers = list(self.inbox)
        self.inbox.clear()
        return answers


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[OldPeer]:
    rig = Rig(tmp_path)
    made = OldPeer(rig)
    rig.peers[NAME] = made  # type: ignore[assignment]
    yield made
    del rig.peers[NAME]  # the rig closes clients of its own
    rig.close()


@pytest.mark.parametrize("name", NAMES)
def test_recorded_bytes_of_the_version_before_mean_what_they_meant_and_are_still_said_so(name: str) -> None:
    data = recorded(name, LAST_VERSION)
    decode = decode_client_message if type_of(data) in CLIENT_MESSAGES else decode_daemon_message
    assert encode(decode(data)) == data


def test_what_is_new_may_be_left_out_and_nothing_is_gone() -> None:
    now: dict[str, Any] = CLIENT_MESSAGES | DAEMON_MESSAGES | {part.__name__: part for part in PARTS}
    for name, before in FIELDS.items():
        fields = {field.name: field for field in record_of(now[name]).fields}
        assert set(before) <= set(fields), name
        assert not [new for new in set(fields) - set(before) if fields[new].required], name


def test_a_client_of_the_version_before_is_served_in_its_version(peer: OldPeer) -> None:
    """All that it can say is understood, and all that it is told has the fields that it knows."""
    (answer,) = peer.say(recorded("hello", LAST_VERSION))
    welcome = decode_daemon_message(answer)
    assert isinstance(welcome, Welcome)
    assert welcome.version == 1
    heard = [answer]
    for name in NAMES:
        data = recorded(name, LAST_VERSION)
        if type_of(data) in CLIENT_MESSAGES and name not in ("hello", "goodbye"):
            heard += peer.say(data)
    for _ in range(200):
        peer.rig.turn()
    heard += peer.take()
    messages = [msgpack.unpackb(data) for data in heard]
    assert {"welcome", "accepted", "tokens", "rows", "finished", "reply", "failed"} <= {m["type"] for m in messages}
    for message in messages:
        assert set(message) - {"type"} <= set(FIELDS[message["type"]])
        for event in message.get("events", []):
            assert set(event) <= set(FIELDS["TokenBatch"])
        if "limits" in message:
            assert set(message["limits"]) <= set(FIELDS["ServerLimits"])
    assert not [m for m in messages if m["type"] == "failed" and "not a known field" in m["message"]]
    for request in list(peer.rig.clients.requests()):
        peer.rig.harness.engine.cancel(request)
    for _ in range(20):
        peer.rig.turn()
    for name in ("r2", "s1"):  # which are kept
        peer.say(encode(CloseSequence(99, name)))
    peer.say(recorded("goodbye", LAST_VERSION))
    assert peer.rig.sessions.get(NAME) is None


def hello(**fields: Any) -> bytes:
    data: bytes = msgpack.packb({"type": "hello"} | fields)
    return data


def test_the_highest_version_that_both_know_is_spoken(peer: OldPeer) -> None:
    (answer,) = peer.say(hello(versions=[99, 1, PROTOCOL_VERSION, 7]))
    welcome = decode_daemon_message(answer)
    assert isinstance(welcome, Welcome)
    assert welcome.version == PROTOCOL_VERSION


@pytest.mark.parametrize("versions", [[PROTOCOL_VERSION + 1], [2**31 - 1, 99]])
def test_a_client_of_versions_that_are_not_known_is_told_so_and_may_try_again(
    peer: OldPeer, versions: list[int]
) -> None:
    (answer,) = peer.say(hello(versions=versions))
    failed = decode_daemon_message(answer)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("unsupported", "versions")
    assert set(msgpack.unpackb(answer)) - {"type"} <= set(FIELDS["failed"])
    (answer,) = peer.say(recorded("hello", LAST_VERSION))
    assert isinstance(decode_daemon_message(answer), Welcome)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (hello(versions=[0]), "versions[0]"),
        (hello(versions=[]), "versions"),
        (hello(versions=[PROTOCOL_VERSION], colour="red"), "colour"),  # of a version to come, which must not need it
    ],
)
def test_a_hello_that_no_version_has_is_refused_by_name(peer: OldPeer, data: bytes, where: str) -> None:
    (answer,) = peer.say(data)
    failed = decode_daemon_message(answer)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.field) == ("invalid_argument", where)


def test_a_client_goes_along_with_a_daemon_of_the_version_before_and_no_other() -> None:
    old = recorded("welcome", LAST_VERSION)
    core = Core("new")
    core.connected()
    offered = decode_client_message(core.outbox.popleft())
    assert offered.versions == SUPPORTED_VERSIONS  # type: ignore[union-attr]
    assert negotiate(offered.versions) == PROTOCOL_VERSION  # type: ignore[union-attr]
    core.receive(old)
    assert core.state is State.TYING
    assert core.welcome is not None
    assert core.welcome.version == 1
    later = msgpack.packb(msgpack.unpackb(old) | {"version": PROTOCOL_VERSION + 1})
    other = Core("new")
    other.connected()
    with pytest.raises(Unsupported):
        other.receive(later)
    with pytest.raises(ProtocolError):
        other.receive(msgpack.packb(msgpack.unpackb(old) | {"mood": "good"}))
