"""Requests without a session, which wait for their owners to come back, each for its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..engine.engine import Engine
from ..engine.request import Request
from ..system.timers import Timers

Key = tuple[int, str]
"""uid and request_id."""

MAX_LINGERING = 4096
"""Requests kept for clients that may come back; beyond that the oldest that are over go first."""


class Lingering:
    """Requests are cancelled when their time is over."""

    def __init__(self, engine: Engine, timers: Timers) -> None:
        self._engine = engine
        self._timers = timers
        self._requests: dict[Key, Request] = {}
        self._until: dict[Key, float] = {}  # monotonic seconds
        self._set_aside: dict[Key, str] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, uid: int, request_id: str) -> Request | None:
        return self._requests.get((uid, request_id))

    def keep(self, request: Request, until: float) -> None:
        key = (request.uid, request.request_id)
        namesake = self._requests.get(key)
        if namesake is request:
            until = max(until, self._until[key])
        elif namesake is not None:
            self._engine.cancel(namesake)  # nobody could ask for it any more
        self._requests[key], self._until[key] = request, until
        self._timers.at(until, lambda: self._expire(key, until))
        if len(self._requests) > MAX_LINGERING:
            over = next((other for other, kept in self._requests.items() if kept.done), key)
            self._expire(over, self._until[over])

    def take(self, request: Request) -> None:
        """Its owner is back. Nothing if it does not wait here."""
        key = (request.uid, request.request_id)
        if self._requests.get(key) is request:
            del self._requests[key], self._until[key]

    def _expire(self, key: Key, until: float) -> None:
        if self._until.get(key) == until:  # else its owner was here, and left again
            request = self._requests[key]
            self.take(request)
            self._engine.cancel(request)

    # Requests of an earlier daemon that cannot go on

    def set_aside(self, reasons: Mapping[Key, str], until: float) -> None:
        """Tell their owners until then why they cannot go on."""
        self._set_aside.update(reasons)
        self._timers.at(until, self._set_aside.clear)

    def why_set_aside(self, uid: int, request_id: str) -> str | None:
        return self._set_aside.get((uid, request_id))
