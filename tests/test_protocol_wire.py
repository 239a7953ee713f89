"""The wire as it was recorded: the same bytes for the same message, and every message has a recording."""

from __future__ import annotations

import pytest

from kvpool.client.errors import ERRORS_BY_CODE
from kvpool.client.lifeline import FrameReader
from kvpool.client.protocol import (
    CLIENT_MESSAGES,
    DAEMON_MESSAGES,
    PROTOCOL_VERSION,
    decode_client_message,
    decode_daemon_message,
)
from tests.support.protocol_tables import PAGE, all_tables
from tests.support.wire_samples import FRAMES, SAMPLES, WIRE, recorded, recordings


@pytest.mark.parametrize("name", recordings())
def test_the_bytes_are_those_recorded(name: str) -> None:
    assert (WIRE / f"{name}.hex").read_text() == recordings()[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_recorded_bytes_are_understood(name: str) -> None:
    decode = decode_client_message if type(SAMPLES[name]) in CLIENT_MESSAGES.values() else decode_daemon_message
    assert decode(recorded(name)) == SAMPLES[name]


def test_recorded_frames_arrive_in_pieces() -> None:
    stream = b"".join(recorded(name) for name in FRAMES)
    reader = FrameReader()
    frames = [frame for i in range(len(stream)) for frame in reader.feed(stream[i : i + 1])]
    assert [frame.kind.name.lower() for frame in frames] == [name.removeprefix("lifeline_") for name in FRAMES]


def test_nothing_is_missing_and_nothing_is_left_over() -> None:
    kinds = {type(message) for message in SAMPLES.values()}
    assert kinds == {*CLIENT_MESSAGES.values(), *DAEMON_MESSAGES.values()}
    assert {path.stem for path in WIRE.iterdir()} == {*SAMPLES, *FRAMES}


def test_the_page_describes_the_wire_as_it_is() -> None:
    page = PAGE.read_text()
    for name, table in all_tables().items():
        assert table in page, f"the table of {name} is out of date: python -m tests.support.protocol_tables"
    for name in (*CLIENT_MESSAGES, *DAEMON_MESSAGES):
        assert f"**`{name}`**" in page
    for code in ERRORS_BY_CODE:
        assert f"| `{code}` |" in page
    assert f"Version {PROTOCOL_VERSION}." in page
