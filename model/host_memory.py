"""Memory of the CPU back end: page-aligned, touched once, in huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap
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
    memory = mmap.mmap(-1, max(1, size) + SLACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Private, because shared memory rarely gets huge pages; with small ones a step misses the TLB all the time.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[:size]


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


class Layout:
    """Hands out aligned offsets; then `place` turns offsets into one mapping."""

    def __init__(self) -> None:
        self.size = 0

    def reserve(self, size: int) -> int:
        """The offset of `size` bytes that start on a cache line."""
        offset = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return offset
