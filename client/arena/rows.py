"""Rows of logits on their way down, in places of one size: the client reads them there, and gives back in any order.

The program's arrays are the daemon's copy: a row is given back when the array and every view of it is gone. For each
place the client has a word that counts how often it was given back, and the daemon counts how often it was used: it is
free while the two agree. A client that is lent many copies further rows out, so that a program may keep all it reads.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

from ..forking import after_fork_in_child, after_fork_in_parent, forking
from ..wire.errors import ProtocolError
from .arena import ROWS_RETURNED, Arena

Float32 = NDArray[np.float32]

ALIGNMENT = 64
"""Of a copy. A row begins where a page does, and the system's large pieces of memory 16 bytes behind one: copies from
the one to the other take five times as long, as each store looks like one that the next load waits for."""


class RowWriter:
    """The daemon's end."""

    def __init__(self, arena: Arena) -> None:
        self._words = arena.words
        self._places = arena.rows
        self._times_used = [0] * len(self._places)
        self._free = list(range(len(self._places)))[::-1]  # the last that came back is the next: it is in the caches
        self._lent: deque[int] = deque()  # in the order in which they were used

    def put(self, row: Float32) -> int | None:
        """Copy a row in: its place, or None where all are in use. Raises ProtocolError for a word of the client's that
        cannot be."""
        self._collect()
        if not self._free:
            return None
        place = self._free.pop()
        self._places[place][:] = row.data.cast("B")
        self._times_used[place] += 1
        self._lent.append(place)
        return place

    def _collect(self) -> None:
        """Mostly the oldest come back first: the others are looked at only when there is no other way."""
        while self._lent and self._is_back(self._lent[0]):
            self._free.append(self._lent.popleft())
        if not self._free:
            self._free = [place for place in self._lent if self._is_back(place)]
            self._lent = deque(place for place in self._lent if place not in self._free)

    def _is_back(self, place: int) -> bool:
        returned, used = self._words[ROWS_RETURNED + place], self._times_used[place]
        if returned != used and returned != used - 1:
            raise ProtocolError(f"is {returned}, and can only be {used - 1} or {used}", field="arena.rows_returned")
        return returned == used


class _Loan(weakref.ref[Float32]):
    """Of a place, as long as there is an array that shows it."""

    __slots__ = ("place",)
    place: int  # FOR_EVER: it is not given back


FOR_EVER = -1


class RowReader:
    """The client's end. Arrays may go in any thread at any time, also when the arena was closed: its memory goes with
    the last of them. That one went is only noted then, by no Python code that a signal could interrupt, and its place
    given back when the next one comes or is read."""

    def __init__(self, arena: Arena) -> None:
        self._words = arena.words
        self._places = [row.toreadonly() for row in arena.rows]
        self._max_loans = len(self._places) // 2
        self._loans: dict[int, _Loan] = {}  # by place
        self._ended: deque[_Loan] = deque()
        self._times_returned = [0] * len(self._places)
        after_fork_in_parent(self._leave_to_child)
        after_fork_in_child(self.close)

    def take(self, place: int) -> Float32:
        """The row that lies there, little-endian, read-only. Raises ProtocolError for a place that cannot be."""
        if self._ended:
            self.settle_ended()
        if place >= len(self._places) or place in self._loans:
            raise ProtocolError(f"there is no row to be read at {place}", field="arena.rows")
        row = np.frombuffer(self._places[place], dtype="<f4")
        if len(self._loans) >= self._max_loans:
            row = _copy(row)
            self._give_back(place)
        else:
            self._loans[place] = loan = _Loan(row, self._ended.append)
            loan.place = place
        return row

    def settle_ended(self) -> None:
        """Give back the places of arrays that are gone."""
        while self._ended and not forking():
            loan = self._ended.popleft()
            if loan.place != FOR_EVER:
                del self._loans[loan.place]
                self._give_back(loan.place)

    def _give_back(self, place: int) -> None:
        self._times_returned[place] += 1
        self._words[ROWS_RETURNED + place] = self._times_returned[place]

    def _leave_to_child(self) -> None:
        """The child has the same arrays, for as long as it likes: what they show stays theirs."""
        for loan in list(self._loans.values()):
            loan.place = FOR_EVER

    def close(self) -> None:
        """Nothing is given back any more. Idempotent."""
        self._loans.clear()
        self._ended.clear()
        for place in self._places:
            with contextlib.suppress(BufferError):  # in use by a program's array, and gone with it
                place.release()


def _copy(row: Float32) -> Float32:
    memory = np.empty(row.nbytes + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    copy = memory[begin : begin + row.nbytes].view(row.dtype)
    copy[:] = row
    copy.flags.writeable = False
    return copy
