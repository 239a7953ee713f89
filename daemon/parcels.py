"""What is on its way to one client, and how it gets there: messages through ZeroMQ, tokens through the arena's ring.

A parcel that its reader has no room for stays first in the session's outbox and is given again later, what is left of
it. So order is kept whichever way things go.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from ..client.protocol import TokenBatch
from .sessions import Session


class Sent(Enum):
    """What became of a message."""

    YES = "yes"
    FULL = "full"  # the peer does not read fast enough: try again later
    GONE = "gone"  # there is no such peer any more


Send = Callable[[bytes, bytes], Sent]
"""Hands bytes to ZeroMQ for the peer with a routing id."""


class Parcel(Protocol):
    def give(self, session: Session, send: Send) -> Sent:
        """Deliver, or what is left of it. Raises ProtocolError if the session's arena was damaged by its client."""


class Letter:
    """One encoded message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def give(self, session: Session, send: Send) -> Sent:
        return send(session.routing_id, self._data)


class RingTokens:
    """Tokens of one step, for the ring: (handle, tokens) of each sample."""

    def __init__(self, batches: list[tuple[int, TokenBatch]]) -> None:
        self._batches = batches
        self._first = 0  # token of the first batch that is not written yet

    def give(self, session: Session, send: Send) -> Sent:
        arena, lifeline = session.arena, session.lifeline
        if arena is None or lifeline is None:
            return Sent.GONE
        ring, done = arena.ring, 0
        for handle, batch in self._batches:
            self._first = ring.write(handle, batch, self._first)
            if self._first < len(batch.token_ids):
                break
            done, self._first = done + 1, 0
        del self._batches[:done]
        if ring.publish():
            lifeline.ring()
        return Sent.FULL if self._batches else Sent.YES
