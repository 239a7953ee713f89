"""Records on their way into one session's ring, for which there was no room at once, or whose logits come first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ...client.arena.arena import RECORD_BYTES
from ...client.arena.ring import FLAGS_AT, LOGITS, PLACE, TEXT_AT
from ...client.arena.rows import RowWriter
from .parcels import Send, Sent
from .sessions import Session


def places_of_logits(records: bytes) -> list[int]:
    """Where in `records` the places of logits are to be written, as `PLACE`."""
    flags = records[FLAGS_AT::RECORD_BYTES]
    return [number * RECORD_BYTES + TEXT_AT for number, flag in enumerate(flags) if flag & LOGITS]


class RingRecords:
    """Records for the ring, of one step. `logits`: the rows of those tokens that have some, in order."""

    def __init__(self, records: bytes, logits: Sequence[NDArray[Any]] = ()) -> None:
        self._logits = deque(zip(places_of_logits(records), logits, strict=True)) if logits else None
        self._records = memoryview(bytearray(records)) if logits else records
        self._written = 0  # bytes

    @property
    def num_bytes(self) -> int:
        return len(self._records) - self._written + sum(row.nbytes for _, row in self._logits or ())

    def give(self, session: Session, send: Send) -> Sent:
        arena = session.arena
        if arena is None:
            return Sent.GONE
        ready = len(self._records) if self._logits is None else self._place_logits(self._logits, arena.rows)
        self._written += arena.ring.write(self._records[self._written : ready])
        return Sent.YES if self._written == len(self._records) else Sent.FULL

    def _place_logits(self, logits: deque[tuple[int, NDArray[Any]]], rows: RowWriter) -> int:
        """Copy rows into the arena while there is room; how many bytes of the records may go, therefore."""
        while logits:
            at, row = logits[0]
            place = rows.put(row)
            if place is None:
                return at // RECORD_BYTES * RECORD_BYTES
            PLACE.pack_into(self._records, at, place)
            logits.popleft()
        return len(self._records)
