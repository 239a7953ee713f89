"""Memory of the CPU back end: page-aligned, touched once, in huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .host import available_memory, usable_cpus

Bytes = NDArray[np.uint8]
ALIGNMENT = 64  # a cache line
SLACK_BYTES = 4096  # whole vectors may be read past the end of the last row


def map_bytes(size: int, purpose: str, remedy: str) -> Bytes:
    """(size,) uint8 zeros that are really there. Raises MemoryError naming what to set."""
    with becoming_real(reserve_bytes(size, purpose, remedy)) as memory:
        return memory


def reserve_bytes(size: int, purpose: str, remedy: str) -> Bytes:
    """(size,) uint8 zeros, promised only: see `becoming_real`. Raises MemoryError naming what to set."""
    if size + SLACK_BYTES > available_memory():
        raise MemoryError(
            f"{purpose} needs {size / 2**20:.0f} MiB, {available_memory() / 2**20:.0f} MiB are available; {remedy}"
        )
    return np.frombuffer(_map(size), dtype=np.uint8)[:size]


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(1, size) + SLACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private, because shared memory rarely gets huge pages; with small ones a step misses the TLB all the time.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextlib.contextmanager
def becoming_real(memory: Bytes) -> Iterator[Bytes]:
    """What `reserve_bytes` promised is really there at the end; the caller may do something else meanwhile."""
    parts = np.array_split(memory, usable_cpus())
    with ThreadPoolExecutor(len(parts)) as pool:
        touched = [pool.submit(_touch, part) for part in parts]
        yield memory
        for each in touched:
            each.result()


def _touch(part: Bytes) -> None:
    """Make every page of `part` real. NumPy lets go of the interpreter meanwhile."""
    part[:: mmap.PAGESIZE] = 0
    part[-1:] = 0


class HeadStart:
    """Memory that a thread makes real, from its front on, while it is not yet known how much of it will be needed.

    A gigabyte takes a second or two, in which a start has other things to do, most of them with one processor.
    """

    CHUNK_BYTES = 16 << 20
    SHARE = 1 / 8  # of what is available, at most: weights, whose size nobody knows yet, must not miss it

    def __init__(self, most: int) -> None:
        """`most`: bytes that may be needed. Nothing is done where that is more than SHARE."""
        self._size = most if most <= available_memory() * self.SHARE else 0
        self._mapping = _map(self._size)
        self._memory: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.touched = 0  # bytes that are real
        self._enough = False
        self._thread = threading.Thread(target=self._run, name="kvpool-memory", daemon=True)
        if self._size:
            self._thread.start()

    def _run(self) -> None:
        while not self._enough and self.touched < self._size:
            end = min(self.touched + self.CHUNK_BYTES, self._size)
            _touch(self._memory[self.touched : end])
            self.touched = end

    def take(self, size: int, purpose: str, remedy: str) -> tuple[Bytes, int]:
        """(size,) uint8 zeros as of `reserve_bytes`, and how many are real; what is too much goes back. Once."""
        self._enough = True
        if self._size:
            self._thread.join()
        real, self.touched = self.touched, 0
        kept = -(-(size + SLACK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE if size <= self._size else 0
        if kept < real:
            self._mapping.madvise(mmap.MADV_DONTNEED, kept, len(self._mapping) - kept)
        if not kept:
            return reserve_bytes(size, purpose, remedy), 0
        return self._memory[:size], min(real, size)


class Layout:
    """Hands out aligned offsets; then `place` turns offsets into one mapping."""

    def __init__(self) -> None:
        self.size = 0

    def reserve(self, size: int) -> int:
        """The offset of `size` bytes that start on a cache line."""
        offset = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return offset
