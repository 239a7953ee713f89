"""The arena's memory: its layout and seals, the ring against a deque, the regions, and words that cannot be true."""

from __future__ import annotations

import fcntl
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.client.arena.arena import (
    BULK_TAIL,
    HEADER,
    PAGE_BYTES,
    READER_AWAKE,
    RECORD_BYTES,
    RING_HEAD,
    RING_TAIL,
    ROWS_RETURNED,
    VERSION,
    Arena,
    Layout,
)
from kvpool.client.arena.bell import Bell
from kvpool.client.arena.regions import BulkReader, BulkWriter, UploadReader, UploadWriter
from kvpool.client.arena.ring import RECORD, TEXT_BYTES, RingReader
from kvpool.client.arena.rows import RowReader
from kvpool.client.results import TokenEvent
from kvpool.client.wire.errors import InvalidArgument, ProtocolError
from kvpool.client.wire.token_ids import pack_token_ids
from kvpool.daemon.serving.rings import FIRST_CAPACITY, Ring, Rings
from tests.support.ring_records import Item, records_of

SMALL = Layout(ring_records=128, upload_bytes=PAGE_BYTES, bulk_bytes=PAGE_BYTES, row_bytes=400, num_rows=2)


@contextmanager
def both_ends(layout: Layout = SMALL) -> Iterator[tuple[Arena, Arena]]:
    """The daemon's and the client's mapping of one arena, made as they make them."""
    daemon, fd = Arena.create(layout)
    client = Arena.open(fd)
    os.close(fd)
    yield daemon, client
    client.close()
    daemon.close()


NO_BELL = 2**16
"""A descriptor that nobody has: without `Rings.wake` nobody uses it."""


def ring_ends(daemon: Arena, client: Arena) -> tuple[Ring, RingReader]:
    return Rings().open(daemon, NO_BELL), RingReader(client, RowReader(client))


# Layout


def test_what_one_side_writes_the_other_reads_where_the_page_says() -> None:
    with both_ends() as (daemon, client):
        assert client.layout == SMALL
        assert SMALL.total_bytes == 3 * PAGE_BYTES + 128 * RECORD_BYTES + 4 * PAGE_BYTES
        words = (RING_HEAD, RING_TAIL, BULK_TAIL, READER_AWAKE, ROWS_RETURNED)
        for place in words:
            daemon.words[place] = 2**64 - 1 - place
            assert client.words[place] == 2**64 - 1 - place
        assert [8 * place for place in words] == [4096, 8192, 8192 + 64, 8192 + 128, 8192 + 192]
        for there, here in zip((*daemon.rows, daemon.bulk), (*client.rows, client.bulk), strict=True):
            there[-1] = 7
            assert here[-1] == 7
        client.upload[0] = 9
        assert daemon.upload[0] == 9


@pytest.mark.parametrize(
    "sizes",
    [
        (0, PAGE_BYTES, PAGE_BYTES, 4, 1),
        (100, PAGE_BYTES, PAGE_BYTES, 4, 1),
        (2**21, PAGE_BYTES, PAGE_BYTES, 4, 1),
        (128, 100, PAGE_BYTES, 4, 1),
        (128, PAGE_BYTES, 0, 4, 1),
        (128, PAGE_BYTES, 2**31, 4, 1),
        (128, PAGE_BYTES, PAGE_BYTES, 0, 1),
        (128, PAGE_BYTES, PAGE_BYTES, 6, 1),
        (128, PAGE_BYTES, PAGE_BYTES, 4, 0),
        (128, PAGE_BYTES, PAGE_BYTES, 4, 489),
        (128, PAGE_BYTES, PAGE_BYTES, 2**30, 2),
    ],
)
def test_sizes_that_no_arena_has(sizes: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"power of two|whole pages|whole float32"):
        Layout(*sizes)


def test_nobody_can_change_the_size_or_lift_a_seal() -> None:
    arena, fd = Arena.create(SMALL)
    for size in (0, SMALL.total_bytes - PAGE_BYTES, SMALL.total_bytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(fd)
    os.close(fd)
    arena.close()
    arena.close()  # twice is as good as once


def memory_file(data: bytes, *, seal: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


GOOD = SMALL.header() + bytes(SMALL.total_bytes - HEADER.size)


@pytest.mark.parametrize(
    ("data", "seal"),
    [
        (GOOD, False),  # could shrink under us
        (GOOD[:-1], True),
        (GOOD[:20], True),
        (b"", True),
        (GOOD + b"x", True),
        (b"XXXX" + GOOD[4:], True),
        (GOOD[:4] + struct.pack("<I", VERSION - 1) + GOOD[8:], True),
        (HEADER.pack(b"KVPA", VERSION, 3, 32, PAGE_BYTES, PAGE_BYTES, 400, 2) + GOOD[HEADER.size :], True),
        (HEADER.pack(b"KVPA", VERSION, 128, 64, PAGE_BYTES, PAGE_BYTES, 400, 2) + GOOD[HEADER.size :], True),
        (HEADER.pack(b"KVPA", VERSION, 2**60, 32, 2**62, 2**63, 2**63, 2**63) + GOOD[HEADER.size :], True),
    ],
)
def test_a_descriptor_that_is_no_arena_is_refused(data: bytes, seal: bool) -> None:
    fd = memory_file(data, seal=seal)
    with pytest.raises(ProtocolError) as caught:
        Arena.open(fd)
    assert caught.value.field == "arena"
    os.close(fd)


def test_descriptors_of_other_kinds_are_refused() -> None:
    reader, writer = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (reader, writer, null):
        with pytest.raises(ProtocolError):
            Arena.open(fd)
        os.close(fd)
    with pytest.raises(ProtocolError):
        Arena.open(reader)  # closed by now


# The ring


texts = st.text(max_size=40) | st.just("") | st.text("é日🌊", min_size=3, max_size=30)
logprobs = st.floats(-(2.0**100), 0, width=32) | st.just(float("-inf"))
tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), texts, logprobs), max_size=24)


class RingMachine(RuleBasedStateMachine):
    """One writer, one reader, and what is between them. A token has come when its last record has."""

    def __init__(self) -> None:
        super().__init__()
        self.daemon, fd = Arena.create(SMALL)
        self.client = Arena.open(fd)
        os.close(fd)
        self.writer, self.reader = ring_ends(self.daemon, self.client)
        self.rest = b""  # for which there was no room
        self.unread = 0  # records
        self.coming: deque[list[Any]] = deque()  # of each token: records that are still to be read, handle, event

    @precondition(lambda self: not self.rest)
    @rule(handle=st.integers(0, 2**32 - 1), items=tokens, index=st.integers(0, 2**30), sample=st.integers(0, 1023))
    def write(self, handle: int, items: list[Item], index: int, sample: int) -> None:
        for i, (records, item) in enumerate(zip(records_of(items, handle, index, sample), items, strict=True)):
            assert len(records) == RECORD_BYTES * max(1, -(-len(item[1].encode()) // TEXT_BYTES))
            self.coming.append([len(records) // RECORD_BYTES, handle, TokenEvent(*item, index + i, sample)])
            self.rest += records
        self.write_rest()

    @rule()
    def write_rest(self) -> None:
        free = (SMALL.ring_records - self.unread) * RECORD_BYTES
        count = self.writer.write(self.rest)
        assert count == min(len(self.rest), free)
        self.unread += count // RECORD_BYTES
        self.rest = self.rest[count:]

    @rule()
    def read(self) -> None:
        expected = []
        while self.coming and self.coming[0][0] <= self.unread:
            count, handle, event = self.coming.popleft()
            self.unread -= count
            expected.append((handle, event))
        if self.coming:
            self.coming[0][0] -= self.unread
        self.unread = 0
        assert self.reader.read() == expected

    @precondition(lambda self: self.unread)
    @rule(tail=st.integers(0, 2**64 - 1))
    def a_false_cursor_is_noticed(self, tail: int) -> None:
        true = self.client.words[RING_TAIL]
        self.client.words[RING_TAIL] = tail
        seen, written = self.writer._rings.read_and_written(self.writer.row)
        if seen <= tail <= written:  # nothing that it has seen speaks against it
            tail = written + 1
            self.client.words[RING_TAIL] = tail
        with pytest.raises(ProtocolError, match=r"arena\.ring_tail"):
            self.writer.write(bytes(RECORD_BYTES))
        self.client.words[RING_TAIL] = true

    @invariant()
    def never_more_than_it_holds(self) -> None:
        assert self.unread <= SMALL.ring_records
        assert self.daemon.words[RING_HEAD] == self.writer._rings.read_and_written(self.writer.row)[1]

    def teardown(self) -> None:
        self.client.close()
        self.daemon.close()


RingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_ring_against_a_deque = RingMachine.TestCase


def test_cursors_wrap_around_the_ring_many_times() -> None:
    with both_ends() as (daemon, client):
        (writer, reader), seen = ring_ends(daemon, client), []
        for round_number in range(100):
            records = b"".join(records_of([(i, f"t{i}", -0.5) for i in range(37)], 3, 37 * round_number))
            assert writer.write(records) == len(records)
            seen += [event.index for _, event in reader.read()]
        assert seen == list(range(3700))


def test_a_full_ring_takes_what_fits_and_goes_on_from_there() -> None:
    with both_ends() as (daemon, client):
        (writer, reader), seen = ring_ends(daemon, client), []
        records = b"".join(records_of([(i, "", -1.0) for i in range(300)]))
        while records:
            count = writer.write(records)
            assert count == min(len(records), SMALL.ring_records * RECORD_BYTES)
            records = records[count:]
            if records:
                assert writer.write(records) == 0
            seen += [event.token_id for _, event in reader.read()]
        assert seen == list(range(300))


def test_a_text_longer_than_the_ring_comes_in_the_end() -> None:
    text = "x" * 65536
    with both_ends(Layout(4096, PAGE_BYTES, PAGE_BYTES, 400, 2)) as (daemon, client):
        writer, reader = ring_ends(daemon, client)
        (records,) = records_of([(5, text, None)])
        written = writer.write(records)
        assert reader.read() == []
        assert writer.write(records[written:]) == len(records) - written > 0
        assert reader.read() == [(1, TokenEvent(5, text, None, 0, 0))]


def test_a_ring_that_is_closed_is_left_alone() -> None:
    with both_ends() as (daemon, client):
        rings = Rings()
        writer, other = rings.open(daemon, NO_BELL), rings.open(daemon, NO_BELL)
        writer.close()
        writer.close()
        assert rings.open(daemon, NO_BELL).row == writer.row
        assert rings.open(daemon, NO_BELL).row not in (writer.row, other.row)
        other.close()
        before = bytes(daemon.ring), client.words[RING_HEAD]
        assert other.write(b"".join(records_of([(5, "", None)]))) == 0
        assert (bytes(daemon.ring), client.words[RING_HEAD]) == before


def test_rings_that_come_and_go_before_anybody_is_woken_fill_no_list() -> None:
    with both_ends() as (daemon, _):
        rings = Rings()
        for _ in range(3 * FIRST_CAPACITY):
            writer = rings.open(daemon, NO_BELL)
            assert writer.write(b"".join(records_of([(1, "", None)])))
            assert rings._sleepers.values[:2].tolist() == [1, writer.row]
            writer.close()
            daemon.words[RING_TAIL] = 0


def test_the_table_grows_under_rings_that_are_open() -> None:
    with both_ends() as (daemon, client):
        rings, reader = Rings(), RingReader(client, RowReader(client))
        writer = rings.open(daemon, NO_BELL)
        for number in range(3):
            writer.write(b"".join(records_of([(number, "", None)])))
            for _ in range(FIRST_CAPACITY):
                rings.open(daemon, NO_BELL)
        assert [event.token_id for _, event in reader.read()] == [0, 1, 2]


@pytest.mark.parametrize("head", [129, 2**63, 2**64 - 1])
def test_the_reader_does_not_believe_a_cursor_either(head: int) -> None:
    with both_ends() as (daemon, client):
        _, reader = ring_ends(daemon, client)
        daemon.words[RING_HEAD] = head
        with pytest.raises(ProtocolError, match=r"arena\.ring_head"):
            reader.read()


@pytest.mark.parametrize(
    "record",
    [
        (1, 0, -1, 0.0, 0, 0, 0, b""),
        (1, 0, 5, 0.0, 0, 0, 13, b""),
        (1, 0, 5, 0.0, 0, 8, 0, b""),
        (1, 0, 5, 0.0, 0, 0, 1, b"\xff"),
    ],
)
def test_a_record_that_cannot_be_is_refused(record: tuple[object, ...]) -> None:
    with both_ends() as (daemon, client):
        RECORD.pack_into(daemon.ring, 0, *record)
        daemon.words[RING_HEAD] = 1
        with pytest.raises(ProtocolError, match=r"arena\.ring"):
            ring_ends(daemon, client)[1].read()


plausible = st.builds(
    RECORD.pack,
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
    st.integers(-1, 9),
    st.floats(width=32),
    st.integers(0, 65535),
    st.integers(0, 4),
    st.integers(0, 14),
    st.binary(max_size=12),
)


@given(st.lists(plausible | st.binary(min_size=32, max_size=32), max_size=8), st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_any_bytes_in_the_ring_are_tokens_or_a_protocol_error(records: list[bytes], head: int) -> None:
    with both_ends() as (daemon, client):
        data = b"".join(records)
        daemon.ring[: len(data)] = data
        daemon.words[RING_HEAD] = head
        try:
            events = ring_ends(daemon, client)[1].read()
        except ProtocolError:
            return
        assert len(events) <= head


def test_only_a_reader_that_sleeps_is_woken() -> None:
    with both_ends() as (daemon, client):
        bell, rings, reader = Bell(), Rings(), RingReader(client, RowReader(client))
        writer = rings.open(daemon, bell.fd)

        def rung() -> int:
            """How often."""
            rings.wake()
            try:
                return len(os.read(bell.reader_fd, 100))
            except BlockingIOError:
                return 0

        def write() -> None:
            writer.write(*records_of([(5, "a", -1.0)]))

        write()
        write()
        assert rung() == 1  # who never says anything is always woken
        assert not reader.may_sleep()
        reader.stay_awake()
        write()
        assert rung() == 0
        assert len(reader.read()) == 3
        assert reader.may_sleep()
        write()
        assert rung() == 1
        assert rung() == 0  # there is nothing new
        bell.close()


def test_the_bell_of_a_ring_that_is_closed_is_not_touched() -> None:
    """Its descriptor may be another file's by the time the others are woken."""
    with both_ends() as (daemon, _):
        bell, rings = Bell(), Rings()
        writer, fd = rings.open(daemon, bell.fd), bell.fd
        writer.write(*records_of([(5, "a", -1.0)]))
        writer.close()
        bell.close()
        other_end, another = os.pipe2(os.O_NONBLOCK)
        assert os.dup2(another, fd) == fd
        rings.wake()
        with pytest.raises(BlockingIOError):
            os.read(other_end, 1)
        for descriptor in {other_end, another, fd}:
            os.close(descriptor)


# The regions


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_uploads_lie_undisturbed_until_they_are_answered(sizes: list[int], data: st.DataObject) -> None:
    with both_ends() as (daemon, client):
        writer, reader, waiting = UploadWriter(client), UploadReader(daemon), deque()
        for number, size in enumerate(sizes):
            packed = pack_token_ids(np.arange(number, number + size))
            place = writer.put(f"r{number}", packed)
            if place is not None:
                waiting.append((f"r{number}", place, packed))
            else:
                assert waiting, "an empty region refuses what fits half of it"
            for _, (offset, count), expected in waiting:
                assert reader.copy(offset, count) == expected
            for _ in range(data.draw(st.integers(0, len(waiting)))):
                writer.settle(waiting.popleft()[0])


def test_an_answer_to_something_else_gives_nothing_back() -> None:
    with both_ends() as (daemon, client):
        writer, reader = UploadWriter(client), UploadReader(daemon)
        place = writer.put("a", pack_token_ids([1, 2, 3]))
        writer.settle("b")
        while writer.put("c", bytes(1024)) is not None:
            pass
        assert place is not None
        assert reader.copy(*place) == pack_token_ids([1, 2, 3])
        assert writer.put("too long", bytes(PAGE_BYTES // 2 + 4)) is None


@pytest.mark.parametrize(("offset", "count"), [(PAGE_BYTES, 1), (0, 1025), (4092, 2), (2, 1), (2**30, 2**24)])
def test_a_reference_outside_the_region_is_refused(offset: int, count: int) -> None:
    with both_ends() as (daemon, _), pytest.raises(InvalidArgument) as caught:
        UploadReader(daemon).copy(offset, count)
    assert caught.value.field == "upload"


def test_negative_ids_are_refused_and_later_changes_do_nothing() -> None:
    with both_ends() as (daemon, client):
        reader = UploadReader(daemon)
        client.upload[:8] = struct.pack("<ii", 7, 8)
        taken = reader.copy(0, 2)
        client.upload[:8] = struct.pack("<ii", 7, -8)
        assert taken == struct.pack("<ii", 7, 8)
        with pytest.raises(InvalidArgument) as caught:
            reader.copy(0, 2)
        assert caught.value.field == "prompt[1]"


@given(st.lists(st.integers(1, 512), min_size=1, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_rows_come_out_as_they_went_in(widths: list[int], data: st.DataObject) -> None:
    with both_ends() as (daemon, client):
        writer, reader, waiting = BulkWriter(daemon), BulkReader(client), deque()
        for number, width in enumerate(widths):
            row = np.arange(number, number + width, dtype=np.float32)
            place = writer.put(row)
            if place is None:
                assert waiting, "an empty region refuses what fits half of it"
            else:
                waiting.append((place, row.tobytes()))
            for _ in range(data.draw(st.integers(0, len(waiting)))):
                (begin, num_bytes), expected = waiting.popleft()
                assert reader.take(begin, num_bytes) == expected


def test_false_words_about_rows_are_noticed() -> None:
    with both_ends() as (daemon, client):
        writer, reader = BulkWriter(daemon), BulkReader(client)
        assert writer.put(np.zeros(600, np.float32)) is None  # more than half of the region: never
        begin, num_bytes = writer.put(np.zeros(10, np.float32)) or (0, 0)
        client.words[BULK_TAIL] = num_bytes + 1
        with pytest.raises(ProtocolError, match=r"arena\.bulk_tail"):
            writer.put(np.zeros(1, np.float32))
        reader.take(begin, num_bytes)
        for false in [(0, 4), (PAGE_BYTES - 4, 8)]:
            with pytest.raises(ProtocolError, match=r"arena\.bulk"):
                reader.take(*false)
