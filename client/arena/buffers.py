"""Memory for rows that a program keeps as long as it likes, and that serves the next row once nobody holds it.

A row of logits has hundreds of kilobytes: taken afresh from the system for each, and given back, its pages would cost
several times the copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_FREE = 32
"""Buffers kept for rows to come; a reader that keeps up needs two, one that reads several at once as many more."""

ALIGNMENT = 64
"""Of every buffer. A row lies at the beginning of a page, and the system's large pieces of memory 16 bytes behind one:
copies from the one to the other take five times as long, as each store looks like one that the next load waits for."""


class RowBuffers:
    """All rows mostly have one size. Rows may go in any thread."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque(maxlen=MAX_FREE)
        self._lent: dict[int, tuple[weakref.ref[NDArray[np.float32]], memoryview]] = {}  # by the reference's id

    def copies(self, pieces: Sequence[memoryview]) -> list[NDArray[np.float32]]:
        """The same numbers, of each piece a read-only row, little-endian. All are copied in one go: every copy pushes
        what the interpreter works with out of the first caches."""
        buffers = [self._take(len(piece)) for piece in pieces]
        for buffer, piece in zip(buffers, pieces, strict=True):
            buffer[:] = piece
        return [self._lend(buffer) for buffer in buffers]

    def _lend(self, buffer: memoryview) -> NDArray[np.float32]:
        """It is free again when the array and every view of it is gone: a view refers to the array, as the array's own
        base is none."""
        row = np.frombuffer(buffer, dtype="<f4")
        row.flags.writeable = False
        reference = weakref.ref(row, self._give_back)
        self._lent[id(reference)] = reference, buffer
        return row

    def _take(self, num_bytes: int) -> memoryview:
        while self._free:
            buffer = self._free.pop()
            if len(buffer) == num_bytes:
                return buffer
        return _aligned(num_bytes)

    def _give_back(self, reference: weakref.ref[NDArray[np.float32]]) -> None:
        self._free.append(self._lent.pop(id(reference))[1])


def _aligned(num_bytes: int) -> memoryview:
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory.data[begin : begin + num_bytes]
