"""Memory for rows that a program keeps as long as it likes, and that serves the next row once nobody holds it.

A row of logits has hundreds of kilobytes: taken afresh from the system for each, and given back, its pages would cost
several times the copy.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

MAX_FREE = 32
"""Buffers kept for rows to come; a reader that keeps up needs two, one that reads several at once as many more."""


class RowBuffers:
    """All rows mostly have one size. Rows may go in any thread."""

    def __init__(self) -> None:
        self._free: deque[bytearray] = deque(maxlen=MAX_FREE)
        self._lent: dict[int, tuple[weakref.ref[NDArray[np.float32]], bytearray]] = {}  # by the reference's id

    def copy(self, piece: memoryview) -> NDArray[np.float32]:
        """The same numbers, read-only, little-endian. Its buffer is free again when the array and every view of it is
        gone: a view refers to the array, as the array's own base is none."""
        buffer = self._take(len(piece))
        row = np.frombuffer(buffer, dtype="<f4")
        np.copyto(row, np.frombuffer(piece, dtype="<f4"))
        row.flags.writeable = False
        reference = weakref.ref(row, self._give_back)
        self._lent[id(reference)] = reference, buffer
        return row

    def _take(self, num_bytes: int) -> bytearray:
        while self._free:
            buffer = self._free.pop()
            if len(buffer) == num_bytes:
                return buffer
        return bytearray(num_bytes)

    def _give_back(self, reference: weakref.ref[NDArray[np.float32]]) -> None:
        self._free.append(self._lent.pop(id(reference))[1])
