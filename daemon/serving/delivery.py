"""Giving out: parcels to their readers in order, held for readers that are slow, whose sequences pause meanwhile."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numpy.typing import NDArray

from ...client.arena.ring import RingBatch
from ...client.wire.errors import ProtocolError
from ...client.wire.protocol import DaemonMessage, Finished, Notice, TokenBatch, Tokens, encode
from ..engine.engine import Engine, Output
from ..engine.prompt_rows import Rows
from ..engine.request import Request
from .parcels import LOGITS, Letter, Parcel, RingTokens, Send, Sent, rows_parcels
from .sessions import Session

log = logging.getLogger(__name__)

MAX_OUTBOX = 4096
"""Parcels held for one session that does not read: its sequences pause at the first, a flood of calls ends it."""

MAX_HELD_BYTES = 256 * 2**20
"""Held for all who do not read: beyond that, who holds most of the user that holds most is ended."""

SLOW_READER = "its client does not read"


class Delivery:
    """`gone` settles a session whose reader is not there any more; `damaged` ends one that has broken its arena."""

    def __init__(
        self,
        engine: Engine,
        send: Send,
        *,
        gone: Callable[[Session], None],
        damaged: Callable[[Session, ProtocolError], None],
    ) -> None:
        self._engine = engine
        self._send_bytes = send
        self._gone = gone
        self._damaged = damaged
        self._slow: dict[Session, None] = {}  # have an outbox

    def send(self, session: Session, message: DaemonMessage) -> None:
        """Send, or hold for a reader that is slow, or settle a session that is gone."""
        self.give(session, Letter(encode(message)))

    def give(self, session: Session, parcel: Parcel) -> None:
        if session.closed:
            return
        if not session.outbox:
            if self._hand_over(session, parcel) is not Sent.FULL:
                return
            self._slow[session] = None
            for request in session.requests.values():
                self._engine.pace.hold(request, SLOW_READER)
        num_bytes = parcel.num_bytes
        session.outbox.append((parcel, num_bytes))
        session.held_bytes += num_bytes
        if len(session.outbox) > MAX_OUTBOX:
            self._end(session)
        elif sum(slow.held_bytes for slow in self._slow) > MAX_HELD_BYTES:
            self._end(self._heaviest())

    def _end(self, session: Session) -> None:
        log.warning("session %s of uid %d asks and does not read", session.session_id, session.peer.uid)
        self._gone(session)

    def _heaviest(self) -> Session:
        users: defaultdict[int, int] = defaultdict(int)
        for session in self._slow:
            users[session.peer.uid] += session.held_bytes
        return max(self._slow, key=lambda session: (users[session.peer.uid], session.held_bytes))

    def _hand_over(self, session: Session, parcel: Parcel) -> Sent:
        try:
            sent = parcel.give(session, self._send_bytes)
        except ProtocolError as error:
            session.outbox.clear()
            self._damaged(session, error)
            return Sent.GONE
        if sent is Sent.GONE:
            self._gone(session)
        return sent

    def retry(self) -> None:
        """Offer slow readers what is held for them; whoever has taken everything goes on."""
        for session in list(self._slow):
            self.offer(session)

    def offer(self, session: Session) -> None:
        """The same for one of them."""
        while session.outbox and self._hand_over(session, session.outbox[0][0]) is Sent.YES:
            session.held_bytes -= session.outbox.popleft()[1]
        if not session.outbox:
            self._slow.pop(session, None)
            for request in session.requests.values():
                self._engine.pace.unhold(request)

    def forget(self, session: Session) -> None:
        """It is over: nothing is held for it any more."""
        self._slow.pop(session, None)

    @property
    def has_slow(self) -> bool:
        return bool(self._slow)

    @property
    def num_held(self) -> int:
        """Parcels held for slow readers."""
        return sum(len(session.outbox) for session in self._slow)


def parcels_of(outputs: Iterable[Output], epoch: int) -> Iterator[tuple[Session, Parcel]]:
    """What a turn produced: rows before the tokens they belong to, a session's tokens together, then what ended."""
    events: defaultdict[Session, list[TokenBatch]] = defaultdict(list)
    rings: defaultdict[Session, list[RingBatch]] = defaultdict(list)
    logits: dict[tuple[Request, int], NDArray[Any]] = {}  # of tokens that come next, for the ring
    others: list[tuple[Session, Finished | Notice]] = []
    for request, message in outputs:
        session = request.session
        if not isinstance(session, Session):
            continue
        if isinstance(message, TokenBatch):
            if request.handle is None:
                events[session].append(message)
            else:
                rows = logits.get((request, message.sample)) if request.want_logits else None
                rings[session].append((request.handle, message, rows))
        elif isinstance(message, Rows) and request.handle is not None and message.kind == LOGITS:
            logits[request, message.sample] = message.values
        elif isinstance(message, Rows):
            for parcel in rows_parcels(session, epoch, request.request_id, message):
                yield session, parcel
        else:
            others.append((session, message))
    for session, records in rings.items():
        yield session, RingTokens(records)
    for session, batches in events.items():
        yield session, Letter(encode(Tokens(epoch, tuple(batches))))
    for session, end in others:
        yield session, Letter(encode(end))
