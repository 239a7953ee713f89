"""Things to do at a given time, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timers:
    """A heap of (monotonic seconds, action). An action checks for itself whether it is still wanted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, due: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (due, next(self._order), action))

    @property
    def next_due(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
