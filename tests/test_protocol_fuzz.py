"""Hostile bytes: the decoders raise what they promise and nothing else, and build nothing large out of little."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.wire.errors import ProtocolError
from kvpool.client.wire.protocol import DAEMON_LIMITS, decode_client_message, encode
from tests.support.fuzz_targets import PACKED, SEEDS, TARGETS, mutated
from tests.support.wire_samples import SAMPLES

EXECUTIONS = {"message": 20_000, "cursors": 300, "journal": 1000}
"""Of targets that matter most, or take longest."""


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_changes_to_what_is_right(target: str) -> None:
    """Deterministic, and by hand: a thousand mutations in the time in which Hypothesis draws ten. `bench/fuzz.py`
    searches the same targets for hours, led by coverage."""
    chance = random.Random(1)
    for seed in SEEDS[target]:
        TARGETS[target](seed)
    for _ in range(EXECUTIONS.get(target, 3000)):
        TARGETS[target](mutated(chance.choice(SEEDS[target]), chance, packed=target in PACKED))


@pytest.mark.parametrize("target", TARGETS)
@given(st.binary(max_size=512))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes(target: str, data: bytes) -> None:
    TARGETS[target](data)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=12,
)


@given(st.sampled_from(list(SAMPLES.values())), st.data())
@settings(max_examples=200)
def test_any_value_in_any_field(sample: Any, data: st.DataObject) -> None:
    fields = msgpack.unpackb(encode(sample))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(anything)
    TARGETS["message"](msgpack.packb(fields))


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
