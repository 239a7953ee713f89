"""What is on its way to one client, and how it gets there: messages through ZeroMQ, tokens through the arena's ring.

A parcel that its reader has no room for stays first in the session's outbox and is given again later, what is left of
it. So order is kept whichever way things go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol

from numpy.typing import NDArray

from ...client.wire.protocol import DaemonMessage, encode
from ...client.wire.protocol import Rows as RowsMessage
from ..engine.prompt_rows import Rows
from .sessions import Session

LOGITS = "logits"
MIN_BULK_BYTES = 1024
"""Rows of fewer bytes travel inside their message."""

MAX_ROWS_BYTES = 2**20
"""Rows of more bytes travel in several messages where there is no arena."""


class Sent(Enum):
    """What became of a message."""

    YES = "yes"
    FULL = "full"  # the peer does not read fast enough: try again later
    GONE = "gone"  # there is no such peer any more


Blob = bytes | tuple[int, int]
"""Bytes of a message, or where they lie in the arena's bulk region: cursor and number."""

Send = Callable[[bytes, bytes], Sent]
"""Hands bytes to ZeroMQ for the peer with a routing id."""


class Parcel(Protocol):
    @property
    def num_bytes(self) -> int:
        """Memory that it holds until it is delivered, about; less when part of it was taken."""

    def keep(self) -> None:
        """It has to wait: what it shows of larger arrays becomes its own."""

    def give(self, session: Session, send: Send) -> Sent:
        """Deliver, or what is left of it. Raises ProtocolError if the session's arena was damaged by its client."""


class Letter:
    """One encoded message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def keep(self) -> None:
        pass  # it is

    def give(self, session: Session, send: Send) -> Sent:
        return send(session.routing_id, self._data)


class BulkParcel:
    """An array, in the bulk region where there is one, and the message that tells of it.

    `tell` makes the message, given the bytes or their place. `waits`: for room in the region, however long.
    """

    def __init__(self, values: NDArray[Any], tell: Callable[[Blob], DaemonMessage], *, waits: bool) -> None:
        self._values = values
        self._tell = tell
        self._waits = waits
        self._letter: Letter | None = None  # once it is known where the array lies

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes

    def keep(self) -> None:
        if self._letter is None:  # else they lie where the letter says
            self._values = self._values.copy()

    def give(self, session: Session, send: Send) -> Sent:
        if self._letter is None:
            data = self._place(session)
            if data is None:
                return Sent.FULL
            self._letter = Letter(encode(self._tell(data)))
        return self._letter.give(session, send)

    def _place(self, session: Session) -> Blob | None:
        if session.arena is not None and self._values.nbytes >= MIN_BULK_BYTES:
            place = session.arena.bulk.put(self._values)
            if place is not None or (self._waits and self._values.nbytes <= session.arena.bulk.max_piece_bytes):
                return place
        return self._values.tobytes()


def rows_parcels(session: Session, epoch: int, request_id: str, rows: Rows) -> Iterator[BulkParcel]:
    """Rows about a request, in as many pieces as the way to its reader takes. Those without end wait for room in the
    arena: messages of that size would pile up."""
    limit = MAX_ROWS_BYTES if session.arena is None else session.arena.bulk.max_piece_bytes // 2
    each = max(1, limit // rows.values[0].nbytes)
    for first in range(0, len(rows.values), each):
        yield _rows_parcel(epoch, request_id, rows, rows.index + first, rows.values[first : first + each])


def _rows_parcel(epoch: int, request_id: str, rows: Rows, index: int, values: NDArray[Any]) -> BulkParcel:
    layers = values.shape[1] if values.ndim == 3 else 1

    def tell(data: Blob) -> DaemonMessage:
        return RowsMessage(epoch, request_id, rows.sample, rows.kind, index, len(values), data, layers)

    return BulkParcel(values, tell, waits=rows.transient)
