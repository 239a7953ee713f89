"""Rows of numbers on their way down: where they lie in the region, and the memory they are copied out to."""

from __future__ import annotations

import gc
import os
from collections import deque

import numpy as np
import pytest

from kvpool.client.arena.arena import PAGE_BYTES, Arena, Layout
from kvpool.client.arena.buffers import MAX_FREE, RowBuffers
from kvpool.client.arena.regions import BulkReader, BulkWriter, Teller

REGION_BYTES = 4 * PAGE_BYTES
ROW = np.arange(PAGE_BYTES // 4, dtype=np.float32)


def piece_of(row: np.ndarray) -> memoryview:
    return memoryview(row).cast("B")


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
        np.testing.assert_array_equal(reader.take_row(begin, num_bytes), ROW + number)

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
    row = buffers.copy(piece_of(ROW))
    place, view = row.ctypes.data, row[10:20]
    del row
    other = buffers.copy(piece_of(ROW + 1))
    assert other.ctypes.data != place
    np.testing.assert_array_equal(view, ROW[10:20])
    for derived in (memoryview(view), view.reshape(2, 5), view.view(np.int32)):
        assert buffers.copy(piece_of(ROW)).ctypes.data != place
        del derived
    del view
    again = [buffers.copy(piece_of(ROW + 2)) for _ in range(2)]
    assert place in [row.ctypes.data for row in again]
    np.testing.assert_array_equal(other, ROW + 1)


def test_rows_are_read_only_and_outlive_what_copied_them() -> None:
    buffers = RowBuffers()
    rows = [buffers.copy(piece_of(ROW[:length])) for length in (5, 1000, 7)]
    with pytest.raises(ValueError, match="read-only"):
        rows[0][0] = 1
    del buffers
    gc.collect()
    for row, length in zip(rows, (5, 1000, 7), strict=True):
        np.testing.assert_array_equal(row, ROW[:length])


def test_few_buffers_are_kept() -> None:
    buffers = RowBuffers()
    rows = [buffers.copy(piece_of(ROW)) for _ in range(3 * MAX_FREE)]
    rows.clear()
    assert len(buffers._free) == MAX_FREE
    assert not buffers._lent
    np.testing.assert_array_equal(buffers.copy(piece_of(ROW[:3])), ROW[:3])  # of another size: a buffer of its own
