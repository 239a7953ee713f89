"""Hostile bytes: the decoders raise ProtocolError and nothing else, and build nothing large out of little."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.errors import ProtocolError
from kvpool.client.lifeline import MAX_PAYLOAD_BYTES, FrameReader
from kvpool.client.protocol import DAEMON_LIMITS, decode_client_message, decode_daemon_message, encode
from tests.support.wire_samples import SAMPLES


def decode_both(data: bytes) -> None:
    for decode in (decode_client_message, decode_daemon_message):
        try:
            message = decode(data)
        except ProtocolError:
            continue
        assert decode(encode(message)) == message  # what is taken is a message through and through


@given(st.binary(max_size=512))
@settings(max_examples=500)
def test_arbitrary_bytes(data: bytes) -> None:
    decode_both(data)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=12,
)


@given(st.sampled_from(list(SAMPLES.values())), st.data())
@settings(max_examples=200)
def test_any_value_in_any_field(message: Any, data: st.DataObject) -> None:
    fields = msgpack.unpackb(encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(anything)
    decode_both(msgpack.packb(fields))


def test_mutated_bytes() -> None:
    """Deterministic, and by hand: a thousand mutations a message in the time in which Hypothesis draws ten."""
    chance = random.Random(1)
    for message in SAMPLES.values():
        original = encode(message)
        for _ in range(1000):
            decode_both(mutated(original, chance))


def mutated(original: bytes, chance: random.Random) -> bytes:
    raw = bytearray(original)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(raw))
        match chance.randrange(4):
            case 0:
                raw[place] = chance.randrange(256)
            case 1:
                del raw[place + 1 :]
            case 2:
                raw[place:place] = chance.randbytes(chance.randint(1, 8))
            case 3:
                raw[place:place] = raw[: place + 1]
    return bytes(raw)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # text
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x91" * 100_000,  # depth
        b"\xdd\x00\x00\x10\x00" * 20_000,  # arrays at the limit, inside each other
        b"\xdf\x00\x00\x04\x00" * 20_000,
    ],
)
def test_bombs_stay_small(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_client_message(bomb)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < DAEMON_LIMITS.max_array_items * 10_000


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_lifeline_frames_of_arbitrary_bytes(pieces: list[bytes]) -> None:
    reader = FrameReader()
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                assert len(frame.payload) <= MAX_PAYLOAD_BYTES
    except ProtocolError:
        pass
