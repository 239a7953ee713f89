"""The host pool of a back end whose device is the host: plain memory, and copies that are done when they return."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .host_memory import Bytes, map_bytes


class PlainHostPool(ABC):
    """The part of `backend.Backend` that swaps, over the back end's own `read_blocks` and `write_blocks`."""

    works_ahead = False  # the processors that copy are those that compute
    _swapped_blocks = 0
    _swap_s = 0.0

    @property
    @abstractmethod
    def block_bytes(self) -> int: ...

    @abstractmethod
    def read_blocks(self, blocks: Sequence[int]) -> Bytes: ...

    @abstractmethod
    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> None: ...

    def allocate_host(self, num_slots: int) -> None:
        memory = map_bytes(num_slots * self.block_bytes, "the host pool", "lower host_pool_bytes")
        self._slots: NDArray[np.uint8] = memory.reshape(num_slots, self.block_bytes)

    def swap_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        begin = time.perf_counter()
        self._slots[list(slots)] = self.read_blocks(blocks)
        self._count(len(slots), begin)

    def swap_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        begin = time.perf_counter()
        self.write_blocks(blocks, self._slots[list(slots)])
        self._count(len(slots), begin)

    def read_host(self, slots: Sequence[int]) -> Bytes:
        return self._slots[list(slots)]

    def take_swap_times(self) -> tuple[int, float]:
        taken = self._swapped_blocks, self._swap_s
        self._swapped_blocks, self._swap_s = 0, 0.0
        return taken

    def _count(self, num_blocks: int, begin: float) -> None:
        self._swapped_blocks += num_blocks
        self._swap_s += time.perf_counter() - begin
