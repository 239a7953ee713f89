"""Threads that run steps: asleep in the kernel until a step is launched, and never in need of the GIL while it runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import table as t

ThreadFunction = Callable[[int, int, int, int], None]


class Team:
    """`num_threads` threads over one state table (see `table`). Calls come from one thread.

    `function(state address, thread, wake descriptor, mailbox address)` is what each thread runs; it returns
    only after STOP or FAILED was set.
    """

    def __init__(self, function: ThreadFunction, state: NDArray[np.int64], num_threads: int) -> None:
        self._function, self._state = function, state
        self._progress = np.zeros((int(state[t.NUM_OPS]), t.PROGRESS_BYTES // 8), dtype=np.int64)
        self._mailboxes = np.zeros((num_threads, 8), dtype=np.int64)
        self._error: BaseException | None = None
        self._done = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(num_threads)]
        state[t.NUM_THREADS], state[t.DONE_EVENT] = num_threads, self._done
        state[t.PROGRESS] = self._progress.ctypes.data
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"kvpool-cpu-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def prepare(self) -> None:
        """Close the books of the last step, before the state is changed for the next: a thread that has not left it
        yet must find nothing to claim, whatever numbers of rows it reads."""
        self._progress[:] = (int(self._state[t.GENERATION]) + 1) << t.GENERATION_SHIFT

    def launch(self) -> None:
        """Start the step that the state describes. Raises RuntimeError if a thread failed before."""
        self._check()
        generation = int(self._state[t.GENERATION]) + 1
        self._progress[:] = generation << t.GENERATION_SHIFT
        self._state[t.GENERATION] = generation  # last: a thread that sees it may start at once
        for descriptor in self._wake:
            os.eventfd_write(descriptor, 1)

    def fileno(self) -> int:
        """Polls readable when the launched step is done."""
        return self._done

    def wait(self) -> None:
        """Block until the launched step is done. Raises RuntimeError if a thread failed."""
        os.eventfd_read(self._done)
        self._check()

    def close(self) -> None:
        """Stop the threads, after the step that is running. Idempotent."""
        if self._done < 0:
            return
        self._state[t.STOP] = 1
        for descriptor in self._wake:
            os.eventfd_write(descriptor, 1)
        for thread in self._threads:
            thread.join()
        for descriptor in [self._done, *self._wake]:
            os.close(descriptor)
        self._done, self._wake = -1, []

    def _check(self) -> None:
        if self._state[t.FAILED]:
            raise RuntimeError(f"a compute thread failed: {self._error}") from self._error

    def _serve(self, index: int) -> None:
        mailbox = self._mailboxes[index : index + 1]
        try:
            self._function(self._state.ctypes.data, index, self._wake[index], mailbox.ctypes.data)
        except BaseException as error:
            self._error = error
        if not self._state[t.STOP]:
            self._state[t.FAILED] = 1  # the others must not wait for what this thread had claimed
            os.eventfd_write(self._done, 1)
