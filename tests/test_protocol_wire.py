"""The wire as it was recorded: the same bytes for the same message, and every message has a recording."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from kvpool.client.arena import arena, map_segment, ring
from kvpool.client.lifeline import FrameKind, FrameReader
from kvpool.client.wire.errors import ERRORS_BY_CODE
from kvpool.client.wire.protocol import (
    CLIENT_MESSAGES,
    DAEMON_MESSAGES,
    PROTOCOL_VERSION,
    ROW_KINDS,
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
    assert {path.stem for path in WIRE.glob("*.hex")} == {*SAMPLES, *FRAMES}


def test_the_page_describes_the_wire_as_it_is() -> None:
    page = PAGE.read_text()
    for name, table in all_tables().items():
        assert table in page, f"the table of {name} is out of date: python -m tests.support.protocol_tables"
    for name in (*CLIENT_MESSAGES, *DAEMON_MESSAGES):
        assert f"**`{name}`**" in page
    for code in ERRORS_BY_CODE:
        assert f"| `{code}` |" in page
    assert f"Version {PROTOCOL_VERSION}." in page


def test_the_page_describes_the_shared_memory_as_it_is() -> None:
    page = PAGE.read_text()
    assert f"magic `{arena.MAGIC.decode()}`, uint32 version ({arena.VERSION})" in page
    assert f"uint64 bytes of a record ({arena.RECORD_BYTES})" in page
    cursors = {"ring_head": arena.RING_HEAD, "ring_tail": arena.RING_TAIL, "bulk_tail": arena.BULK_TAIL}
    cursors |= {"reader_awake": arena.READER_AWAKE, "rows_returned": arena.ROWS_RETURNED}
    for name, word in cursors.items():
        assert re.search(rf"^\| {8 * word} \| \w+ \| uint64 `{name}`", page, re.MULTILINE), name
    assert f"\n| {arena.RING_AT} | daemon | the ring" in page
    offset = 0
    fields = ("handle", "index", "token_id", "logprob", "sample", "flags", "bytes")
    for letter, field in zip("IIifHBB", fields, strict=True):
        kind = {"I": "uint32", "i": "int32", "f": "float32", "H": "uint16", "B": "uint8"}[letter]
        assert re.search(rf"^\| {offset} \| {kind} \| `?{field}", page, re.MULTILINE), field
        offset += struct.calcsize(letter)
    assert f"\n| {offset} | {ring.TEXT_BYTES} bytes | text" in page
    assert ring.RECORD.format == "<IIifHBB12s"
    assert f"flags: {ring.HAS_LOGPROB} HAS_LOGPROB, {ring.TEXT_GOES_ON} TEXT_GOES_ON, {ring.LOGITS} LOGITS" in page
    assert ring.PLACE.format == "<I"
    assert f"magic `{map_segment.MAGIC.decode()}`, uint32 version ({map_segment.VERSION})" in page
    for word in (map_segment.SEQUENCE, map_segment.CHANGED_NS, map_segment.DETAILS_BYTES):
        assert f"\n| {8 * word} | uint64" in page
    assert f"\n| {map_segment.ARRAYS_AT} | `states`" in page
    for kind in FrameKind:
        assert f"| {kind.value} {kind.name} |" in page
    for row_kind, dtype in ROW_KINDS.items():
        assert f"| `{row_kind}` | {np.dtype(dtype).name} (" in page
