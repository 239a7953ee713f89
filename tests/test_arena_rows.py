"""Rows of numbers on their way down: where they lie in the region, and the memory they are copied out to."""

from __future__ import annotations

import gc
import os
from collections import deque
from unittest.mock import Mock

import numpy as np
import pytest

from kvpool.client.arena.arena import PAGE_BYTES, Arena, Layout
from kvpool.client.arena.buffers import ALIGNMENT, MAX_FREE, RowBuffers
from kvpool.client.arena.regions import BulkReader, BulkWriter, Teller
from kvpool.client.wire.errors import ProtocolError

REGION_BYTES = 4 * PAGE_BYTES
ROW = np.arange(PAGE_BYTES // 4, dtype=np.float32)


def piece_of(row: np.ndarray) -> memoryview:
    return memoryview(row).cast("B")


def copy_of(buffers: RowBuffers, row: np.ndarray) -> np.ndarray:
    (copy,) = buffers.copies([piece_of(row)])
    return copy


def take_or_close(arena: Arena, reader: BulkReader, places: list[tuple[int, int]]) -> None:
    """As a client does: it closes the arena while the error is handled, when nothing may refer to it any more."""
    try:
        reader.take_rows(places)
    except BaseException:
        arena.close()
        raise


def test_rows_of_a_reader_that_keeps_up_lie_in_one_place() -> None:
    arena, fd = Arena.create(Layout(128, PAGE_BYTES, REGION_BYTES))
    os.close(fd)
    writer, reader, waiting = BulkWriter(arena), BulkReader(arena), deque()

    def put(number: int) -> int:
        place = writer.put(ROW + number, Teller.RING)
        assert place is not None
        waiting.append((place, number))
        return place[0] % REGION_BYTES

    def take() -> None:
        (begin, num_bytes), number = waiting.popleft()
        (row,) = reader.take_rows([(begin, num_bytes)])
        np.testing.assert_array_equal(row, ROW + number)

    for number in range(10):
        assert put(number) == 0
        take()
    for number in range(20):  # one is always there: all of the region is used, round and round
        if number < 1:
            assert put(number) == 0
        else:
            assert put(number) == number % 4 * PAGE_BYTES
            take()
    assert [put(number) for number in range(3)] == [0, PAGE_BYTES, 2 * PAGE_BYTES]
    assert writer.put(ROW, Teller.RING) is None
    while waiting:
        take()
    assert put(0) == 0
    arena.close()


def test_a_buffer_serves_again_when_its_row_and_every_view_of_it_are_gone() -> None:
    buffers = RowBuffers()
    row = copy_of(buffers, ROW)
    place, view = row.ctypes.data, row[10:20]
    del row
    other = copy_of(buffers, ROW + 1)
    assert other.ctypes.data != place
    np.testing.assert_array_equal(view, ROW[10:20])
    for derived in (memoryview(view), view.reshape(2, 5), view.view(np.int32)):
        assert copy_of(buffers, ROW).ctypes.data != place
        del derived
    del view
    again = [copy_of(buffers, ROW + 2) for _ in range(2)]
    assert place in [row.ctypes.data for row in again]
    np.testing.assert_array_equal(other, ROW + 1)


def test_rows_are_read_only_and_outlive_what_copied_them() -> None:
    buffers = RowBuffers()
    rows = [copy_of(buffers, ROW[:length]) for length in (5, 1000, 7)]
    with pytest.raises(ValueError, match="read-only"):
        rows[0][0] = 1
    del buffers
    gc.collect()
    for row, length in zip(rows, (5, 1000, 7), strict=True):
        np.testing.assert_array_equal(row, ROW[:length])


def test_few_buffers_are_kept() -> None:
    buffers = RowBuffers()
    rows = [copy_of(buffers, ROW) for _ in range(3 * MAX_FREE)]
    rows.clear()
    assert len(buffers._free) == MAX_FREE
    assert not buffers._lent
    np.testing.assert_array_equal(copy_of(buffers, ROW[:3]), ROW[:3])  # of another size: a buffer of its own


@pytest.mark.parametrize("length", [1, 1000, 49152, 2**20])
def test_buffers_begin_where_copies_are_fast(length: int) -> None:
    """The system's large pieces of memory begin 16 bytes behind a page, and what is copied from a page to there takes
    five times as long."""
    buffers = RowBuffers()
    rows = buffers.copies([memoryview(bytes(4 * length))] * 3)
    assert [row.ctypes.data % ALIGNMENT for row in rows] == [0, 0, 0]


def test_rows_that_are_taken_together_are_each_their_own_and_all_given_back() -> None:
    arena, fd = Arena.create(Layout(128, PAGE_BYTES, REGION_BYTES))
    os.close(fd)
    writer, reader = BulkWriter(arena), BulkReader(arena)
    for turn in range(3):
        written = [ROW[: length + turn] * length for length in (700, 1, 900, 40)]
        places = [writer.put(row, Teller.RING) for row in written]
        assert None not in places
        rows = reader.take_rows([place for place in places if place])
        for row, expected in zip(rows, written, strict=True):
            np.testing.assert_array_equal(row, expected)
        place = writer.put(ROW, Teller.MESSAGE)  # None where a row of the other teller's is still there
        assert place is not None
        reader.take(*place)
    arena.close()


@pytest.mark.parametrize("second", [(64, 64), (0, 100), (REGION_BYTES - 8, 16)])
def test_no_row_can_lie_before_or_in_another_or_outside(second: tuple[int, int]) -> None:
    arena, fd = Arena.create(Layout(128, PAGE_BYTES, REGION_BYTES))
    os.close(fd)
    with pytest.raises(ProtocolError, match=r"arena\.bulk: no piece"):
        take_or_close(arena, BulkReader(arena), [(0, 128), second])


def test_an_arena_can_be_closed_when_there_is_no_memory_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, fd = Arena.create(Layout(128, PAGE_BYTES, REGION_BYTES))
    os.close(fd)
    writer, reader = BulkWriter(arena), BulkReader(arena)
    place = writer.put(ROW, Teller.RING)
    assert place is not None
    monkeypatch.setattr(RowBuffers, "_take", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        take_or_close(arena, reader, [place])
