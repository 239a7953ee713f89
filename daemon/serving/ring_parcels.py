"""Records on their way into one session's ring for which there is no room yet, or for whose logits there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...client.arena.arena import RECORD_BYTES
from ...client.arena.ring import FLAGS_AT, LOGITS, PLACE, TEXT_AT
from ...client.arena.rows import RowWriter
from ...model.batch import Float32
from .parcels import Send, Sent
from .sessions import Session


class RingRecords:
    """Of one step. `logits`: rows that are not in the arena, of the last tokens that have some."""

    def __init__(self, records: bytearray, logits: Sequence[Float32] = ()) -> None:
        self._records = records
        self._written = 0  # bytes
        flags = records[FLAGS_AT::RECORD_BYTES] if logits else b""
        places = [RECORD_BYTES * number + TEXT_AT for number, flag in enumerate(flags) if flag & LOGITS]
        self._logits = deque(zip(places[len(places) - len(logits) :], logits, strict=True))  # where their place is said

    @property
    def num_bytes(self) -> int:
        return len(self._records) - self._written + sum(row.nbytes for _, row in self._logits)

    def keep(self) -> None:
        self._logits = deque((at, row.copy()) for at, row in self._logits)

    def give(self, session: Session, send: Send) -> Sent:
        arena = session.arena
        if arena is None:
            return Sent.GONE
        ready = self._place_logits(arena.rows) if self._logits else len(self._records)
        self._written += arena.ring.write(self._records[self._written : ready])
        return Sent.YES if self._written == len(self._records) else Sent.FULL

    def _place_logits(self, rows: RowWriter) -> int:
        """Copy rows into the arena while there is room; how many bytes of the records may go, therefore."""
        while self._logits:
            at, row = self._logits[0]
            place = rows.put(row)
            if place is None:
                return at // RECORD_BYTES * RECORD_BYTES
            PLACE.pack_into(self._records, at, place)
            self._logits.popleft()
        return len(self._records)
