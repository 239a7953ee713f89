"""The bell: a pipe by which the daemon wakes a reader of the arena that went to sleep.

A byte in it means: look at the ring. It costs the daemon half of what a word over the lifeline would, and a reader that
is awake (which it says in the arena) needs none. A pipe and not an eventfd, because its two ends are two files: a
client that turns its own end into one that blocks does not block the daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

CAPACITY_BYTES = 4096


class Bell:
    """The daemon's end."""

    def __init__(self) -> None:
        """Raises OSError where no descriptors are left."""
        self.reader_fd, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, CAPACITY_BYTES)

    def forget_reader(self) -> None:
        """The other end was passed on. Idempotent."""
        if self.reader_fd >= 0:
            os.close(self.reader_fd)
            self.reader_fd = -1

    def close(self) -> None:
        """Idempotent."""
        self.forget_reader()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def hush(fd: int) -> None:
    """The reader's end: take out what has rung."""
    with contextlib.suppress(BlockingIOError):
        os.read(fd, CAPACITY_BYTES)
