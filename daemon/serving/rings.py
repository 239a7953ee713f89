"""The daemon's ends of all rings: rows of one table, which machine code goes through (see `cpu_kernels.rings`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cache

from ...client.arena.arena import READER_AWAKE, RECORD_BYTES, RING_AT, RING_HEAD, RING_TAIL, Arena, check_cursor
from ...cpu_kernels import rings as kernels
from ...cpu_kernels.compiler import load_ring_functions
from ...model.cache import cache_directory

FIRST_CAPACITY = 64
"""Rings that the table has room for at first; doubled when more are open."""

INT, BYTES = ctypes.c_int64, ctypes.c_char_p
PACK_RECORDS = ctypes.PYFUNCTYPE(None, INT, BYTES, BYTES, INT, INT)
WRITE_RINGS = ctypes.PYFUNCTYPE(None, INT, INT, INT)
RING_BELLS = ctypes.PYFUNCTYPE(None, INT, INT)
"""Prototypes. They keep the GIL: who gives it up for some microseconds may wait for milliseconds until it is back."""


class Words:
    """int64 at an address that stays."""

    __slots__ = ("address", "values")

    def __init__(self, values: Iterable[int]) -> None:
        self.values = array("q", values)
        self.address, _ = self.values.buffer_info()


class Kernels:
    """Compiled, or read from the cache: the first time on a machine takes a second."""

    def __init__(self) -> None:
        addresses = load_ring_functions(cache_directory() / "kernels")
        self.pack_records = PACK_RECORDS(addresses["pack_records"])
        self.write_rings = WRITE_RINGS(addresses["write_rings"])
        self.ring_bells = RING_BELLS(addresses["ring_bells"])


@cache
def _kernels() -> Kernels:
    return Kernels()


class Batch:
    """Records for several rings, one ring's after the other's. Columns as in `cpu_kernels.rings`; `handles`: uint32 of
    each token."""

    def __init__(
        self, rings: Sequence[Ring], handles: array[int], order: Iterable[int] = (), begins: Iterable[int] = ()
    ) -> None:
        self._handles, self._order, self._begins = handles, Words(order), Words(begins)
        self._rows = Words(ring.row for ring in rings)
        self._ends, self._left = Words([0] * len(rings)), Words([0] * (1 + len(rings)))
        self.ends, self.left = self._ends.values, self._left.values
        self._columns = Words([0] * kernels.BATCH_WORDS)
        self.records = bytearray()
        self.address = self._columns.address
        columns = self._columns.values
        columns[kernels.NUM_READERS] = len(rings)
        columns[kernels.HANDLES], _ = handles.buffer_info()
        columns[kernels.ORDER] = self._order.address
        columns[kernels.BEGINS] = self._begins.address
        columns[kernels.ENDS] = self._ends.address
        columns[kernels.ROWS] = self._rows.address
        columns[kernels.LEFT] = self._left.address
        self.make_room(1)

    def make_room(self, num_records: int) -> None:
        """For so many, if there is less; those that are there may be lost then."""
        if RECORD_BYTES * num_records > len(self.records):
            self.records = bytearray(RECORD_BYTES * num_records)
            self._columns.values[kernels.RECORDS] = ctypes.addressof(ctypes.c_char.from_buffer(self.records))


class Ring:
    """The daemon's end of one session's ring."""

    def __init__(self, rings: Rings, row: int, arena: Arena) -> None:
        self.row = row
        self._rings = rings
        self._words = arena.words
        self._batch = Batch([self], array("I"))
        self._is_open = True

    def write(self, records: bytes | bytearray) -> int:
        """Write whole records as far as there is room, and let the reader see them: how many bytes of them. It is woken
        by the next `Rings.wake`. Raises ProtocolError if its cursor cannot be."""
        batch, count = self._batch, len(records) // RECORD_BYTES
        batch.make_room(count)
        batch.records[: len(records)] = records
        batch.ends[0] = count
        self._rings.write(batch)
        left, batch.left[1] = batch.left[1], 0
        written = len(records) - RECORD_BYTES * left
        if not written:
            check_cursor("ring_tail", self._words[RING_TAIL], *self._rings.read_and_written(self.row))
        return written

    def close(self) -> None:
        """Before its memory goes. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._rings.close(self.row)


class Rings:
    """All of them. Several writes, then `wake`: nobody is woken before everything is there."""

    def __init__(self) -> None:
        self.num_opened = 0  # ever: whoever remembers rows has to look again when it has changed
        self._table, self._sleepers = Words([]), Words([0])
        self._free: list[int] = []

    def load(self) -> Kernels:
        """What goes through the table: once in a process, at its first use if not before."""
        return _kernels()

    def open(self, arena: Arena, bell: int) -> Ring:
        """`bell`: the descriptor that wakes the reader."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        memory = ctypes.addressof(ctypes.c_char.from_buffer(arena.ring)) - RING_AT
        words = [0] * kernels.RING_WORDS
        words[kernels.HEAD_AT] = memory + 8 * RING_HEAD
        words[kernels.TAIL_AT] = memory + 8 * RING_TAIL
        words[kernels.AWAKE_AT] = memory + 8 * READER_AWAKE
        words[kernels.RECORDS_AT] = memory + RING_AT
        words[kernels.LAST_PLACE] = arena.layout.ring_records - 1
        words[kernels.BELL] = bell
        begin = kernels.RING_WORDS * row
        words[kernels.TO_BE_WOKEN] = self._table.values[begin + kernels.TO_BE_WOKEN]  # a row is a sleeper once
        self._table.values[begin : begin + kernels.RING_WORDS] = array("q", words)
        self.num_opened += 1
        return Ring(self, row, arena)

    def _grow(self) -> None:
        before = len(self._table.values) // kernels.RING_WORDS
        more = before or FIRST_CAPACITY
        self._table = Words([*self._table.values, *[0] * (kernels.RING_WORDS * more)])
        self._sleepers = Words([*self._sleepers.values, *[0] * more])
        self._free += range(before, before + more)

    def close(self, row: int) -> None:
        """From now on nothing is written into its memory."""
        self._table.values[kernels.RING_WORDS * row + kernels.BELL] = -1
        self._free.append(row)

    def read_and_written(self, row: int) -> tuple[int, int]:
        """Records of a ring, since it was opened; what was read is known as of the last write."""
        begin = kernels.RING_WORDS * row
        return self._table.values[begin + kernels.TAIL], self._table.values[begin + kernels.HEAD]

    def write(self, batch: Batch) -> bool:
        """Into each ring what there is room for. Whether something is left of one, see `batch.left`."""
        self.load().write_rings(self._table.address, batch.address, self._sleepers.address)
        return bool(batch.left[0])

    def wake(self) -> None:
        """The readers of what was written since the last call, as far as they sleep."""
        if self._sleepers.values[0]:
            self.load().ring_bells(self._table.address, self._sleepers.address)
