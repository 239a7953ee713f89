"""One thread for work that would keep everybody waiting: files that are read, hashed and written.

It gets values and gives values back, and touches nothing of the daemon's: `then` runs on the loop's own thread.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...client.wire.errors import Busy

T = TypeVar("T")

MAX_JOBS = 16
"""Waiting at once; each may hold a sequence's blocks in memory."""


class Background:
    """Jobs are done one after the other. `fileno` polls readable when `collect` has something to do."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvpool-files")
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done: deque[Callable[[], None]] = deque()
        self._num_jobs = 0

    @property
    def idle(self) -> bool:
        return self._num_jobs == 0

    def fileno(self) -> int:
        return self._event

    def check_room(self) -> None:
        """Raises Busy if too many jobs wait."""
        if self._num_jobs >= MAX_JOBS:
            raise Busy(f"{self._num_jobs} snapshots are being written or read", retry_after_ms=200)

    def run(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Do `work` in the thread, then call `then` in the loop with what came of it."""

        def finished(future: Future[T]) -> None:
            self._done.append(lambda: then(future))
            with contextlib.suppress(OSError):  # closed: nobody will collect
                os.eventfd_write(self._event, 1)

        self._num_jobs += 1
        self._executor.submit(work).add_done_callback(finished)

    def collect(self) -> None:
        """Hand out what is done."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        while self._done:
            self._num_jobs -= 1
            self._done.popleft()()

    def close(self) -> None:
        """Finish what was begun."""
        self._executor.shutdown(wait=True)
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
