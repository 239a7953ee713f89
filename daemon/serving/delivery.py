"""Giving out: parcels to their readers in order, held for readers that are slow, whose sequences pause meanwhile."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...client.wire.errors import ProtocolError
from ...client.wire.protocol import DaemonMessage, Finished, Notice, TokenBatch, Tokens, encode
from ..engine.engine import Engine, Output
from ..engine.prompt_rows import Rows
from ..engine.ring_tokens import RingTokens
from .parcels import Letter, Parcel, Send, Sent, rows_parcels
from .ring_packer import Readers, RingPacker, pack_tokens
from .ring_parcels import RingRecords
from .rings import Rings
from .sessions import Session

log = logging.getLogger(__name__)

MAX_OUTBOX = 4096
"""Parcels held for one session that does not read: its sequences pause at the first, a flood of calls ends it."""

MAX_HELD_BYTES = 256 * 2**20
"""Held for all who do not read: beyond that, who holds most of the user that holds most is ended."""

SLOW_READER = "its client does not read"


class Turn(NamedTuple):
    """What a turn of the engine gives to whom: rows before the tokens they belong to, and what ended after them."""

    rows: list[tuple[Session, Parcel]]
    tokens: RingTokens
    readers: Readers  # of the tokens
    letters: list[tuple[Session, Parcel]]


class Delivery:
    """`gone` settles a session whose reader is not there any more; `damaged` ends one that has broken its arena."""

    def __init__(
        self,
        engine: Engine,
        send: Send,
        rings: Rings,
        *,
        gone: Callable[[Session], None],
        damaged: Callable[[Session, ProtocolError], None],
    ) -> None:
        self._engine = engine
        self._send_bytes = send
        self._gone = gone
        self._damaged = damaged
        self._slow: dict[Session, None] = {}  # have an outbox
        self._rings = rings
        self._packer = RingPacker(rings)

    def address(self, outputs: Iterable[Output], tokens: RingTokens, epoch: int) -> Turn:
        """Who gets what of what a turn produced, from now on whatever becomes of the requests."""
        events: defaultdict[Session, list[TokenBatch]] = defaultdict(list)
        rows: list[tuple[Session, Parcel]] = []
        others: list[tuple[Session, Finished | Notice]] = []
        for request, message in outputs:
            session = request.session
            if not isinstance(session, Session):
                continue
            if isinstance(message, TokenBatch):
                events[session].append(message)
            elif isinstance(message, Rows):
                rows += [(session, parcel) for parcel in rows_parcels(session, epoch, request.request_id, message)]
            else:
                others.append((session, message))
        letters: list[tuple[Session, Parcel]] = [
            (session, Letter(encode(Tokens(epoch, tuple(batches))))) for session, batches in events.items()
        ]
        letters += [(session, Letter(encode(end))) for session, end in others]
        return Turn(rows, tokens, self._packer.readers_of(tokens), letters)

    def send(self, session: Session, message: DaemonMessage) -> None:
        """Send, or hold for a reader that is slow, or settle a session that is gone."""
        self.give(session, Letter(encode(message)))

    def give(self, session: Session, parcel: Parcel) -> None:
        self._give(session, parcel)
        self._rings.wake()

    def give_turn(self, turn: Turn) -> None:
        """Whoever sleeps is woken when everything is there: from then on they compete for the processors."""
        for session, parcel in turn.rows:
            self._give(session, parcel)
        if turn.readers.sessions:
            self._give_tokens(turn.tokens, turn.readers)
        for session, parcel in turn.letters:
            self._give(session, parcel)
        self._rings.wake()

    def _give_tokens(self, tokens: RingTokens, readers: Readers) -> None:
        """To all at once who have room for them, and for whom nothing is held."""
        waiting = {session for session in self._slow if session in readers.numbers}
        places = self._place_logits(tokens, readers, waiting) if tokens.logits else {}
        batch = readers.batch
        pack_tokens(tokens, places, batch, self._rings.load())
        for session in waiting:
            batch.left[1 + readers.numbers[session]] = 1
        if not self._rings.write(batch):
            return
        for number, session in enumerate(readers.sessions):
            if batch.left[1 + number]:
                late = [row for row in readers.rows[number] if row in tokens.logits and row not in places]
                records = RingRecords(readers.records_left(number), [tokens.logits[row] for row in late])
                batch.left[1 + number] = 0
                self._give(session, records)

    def _place_logits(self, tokens: RingTokens, readers: Readers, waiting: set[Session]) -> dict[int, int]:
        """Copy rows of logits into their readers' arenas: the place of each, by the token's row. A session without room
        is `waiting` from then on."""
        places: dict[int, int] = {}
        for row, logits in tokens.logits.items():
            session = readers.of_row.get(row)
            if session is None or session.arena is None or session in waiting:
                continue
            try:
                place = session.arena.rows.put(logits)
            except ProtocolError:  # found again, and said, when it has waited
                place = None
            if place is None:
                waiting.add(session)
            else:
                places[row] = place
        return places

    def _give(self, session: Session, parcel: Parcel) -> None:
        if session.closed:
            return
        if not session.outbox:
            if self._hand_over(session, parcel) is not Sent.FULL:
                return
            self._slow[session] = None
            for request in session.requests.values():
                self._engine.pace.hold(request, SLOW_READER)
        parcel.keep()
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

    def retry(self) -> bool:
        """Offer slow readers what is held for them; whoever has taken everything goes on. Whether anybody took some."""
        before = self._left()
        for session in list(self._slow):
            self.offer(session)
        return self._left() != before

    def _left(self) -> dict[Session, tuple[int, int]]:
        """Parcels held for each, and bytes that are left of the first."""
        return {slow: (len(slow.outbox), slow.outbox[0][0].num_bytes) for slow in self._slow if slow.outbox}

    def offer(self, session: Session) -> None:
        """The same for one of them."""
        while session.outbox and self._hand_over(session, session.outbox[0][0]) is Sent.YES:
            session.held_bytes -= session.outbox.popleft()[1]
        self._rings.wake()
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
