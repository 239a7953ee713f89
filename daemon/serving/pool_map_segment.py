"""The pool map for administrators who watch it: written into shared memory, only while somebody has it mapped.

It is written at most four times a second, and seldom enough that this takes a quarter of a percent of one processor.
Other users ask with `map`, which hides from them whose the blocks of others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...client.arena.map_segment import MapLayout, MapWriter
from ...client.lifeline import FrameKind
from ..system.timers import Timers
from .sessions import Session

INTERVAL_S = 0.25  # between two pictures of the pool, at least
COST_SHARE = 400  # how many times as long as making one takes
DETAILS_BASE_BYTES, DETAILS_BYTES_PER_BLOCK = 2**20, 8
"""Some two thousand rows, and the tables of blocks, each of which may stand in several."""


class PoolMapSegment:
    """Made for its first watcher, given up after its last. `answer` is what an administrator gets from `map` now."""

    def __init__(self, answer: Callable[[], Mapping[str, Any]], timers: Timers) -> None:
        self._answer = answer
        self._timers = timers
        self._writer: MapWriter | None = None
        self._watchers: set[Session] = set()

    def share_with(self, session: Session, now: float) -> int:
        """Pass the segment to a session; its bytes. Raises OSError where there is no memory or no descriptor left."""
        if self._writer is None:
            self._writer = _writer_for(self._answer())
            self._write(now)
        self._watchers.add(session)
        if session.lifeline is not None:
            session.lifeline.send(FrameKind.POOL_MAP, fds=[self._writer.fd])
        return self._writer.layout.total_bytes

    def _write(self, now: float) -> None:
        if self._writer is not None:
            begin = time.perf_counter()
            self._writer.write(self._answer())
            cost_s = time.perf_counter() - begin
            due = now + max(INTERVAL_S, COST_SHARE * cost_s)
            self._timers.at(due, lambda: self._write_again(due))

    def _write_again(self, now: float) -> None:
        self._watchers = {session for session in self._watchers if not session.closed}
        if self._watchers:
            self._write(now)
        else:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _writer_for(answer: Mapping[str, Any]) -> MapWriter:
    num_blocks: int = answer["num_blocks"]
    capacity = DETAILS_BASE_BYTES + DETAILS_BYTES_PER_BLOCK * num_blocks
    return MapWriter(MapLayout(num_blocks, answer["block_size"], capacity))
