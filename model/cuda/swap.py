"""The host pool in page-locked memory, and blocks between it and the card beside the steps.

What goes out is gathered on the card in the main lane, before anything that is asked for later can write there; from
that copy it travels to the host in a lane of its own. What comes in travels in that lane too, and enters its blocks
once all that was asked for before is done with them; the work that reads them waits for it, other work does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ..batch import Int32
from .device import REACHED, Bytes, CudaDevice, Mark
from .pool import CudaPool


class CudaHostPool:
    """Slots of one block each, and the copies from and to them; nothing here waits but `read`."""

    def __init__(self, device: CudaDevice, pool: CudaPool) -> None:
        self._device, self._pool = device, pool
        self._lane = device.lane()
        self._slots: Bytes = np.zeros((0, pool.block_bytes), np.uint8)
        self._left: Mark = REACHED  # all that was sent out is on the host
        self._arrived: Mark = REACHED  # all that was brought in is in its blocks
        self._arriving: list[int] = []  # blocks that the main lane has not been made to wait for
        self._let_past = False  # a step that needs none of them
        self._copies: deque[tuple[int, Mark, Mark]] = deque()  # blocks, begin and end of those not yet accounted for

    def allocate(self, num_slots: int) -> None:
        size = num_slots * self._pool.block_bytes
        memory = self._device.staging(size, "the host pool", "lower host_pool_bytes")
        self._slots = memory.reshape(num_slots, self._pool.block_bytes)

    @property
    def arriving(self) -> bool:
        """Something was brought in that the main lane has not been made to wait for."""
        return bool(self._arriving)

    def send_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to slots. What is asked for later may write to the blocks."""
        self.settle()
        for start in range(0, len(blocks), self._pool.room_blocks):
            chunk = slice(start, start + self._pool.room_blocks)
            room = self._pool.turn(self._device)
            self._pool.gather(self._device, room, blocks[chunk])
            self._lane.after(self._device.mark())
            begin = self._lane.mark()
            for at, first, last in _runs(slots[chunk]):
                host = self._slots[first:last].reshape(-1)
                self._lane.download(host, room.address + at * self._pool.block_bytes)
            room.free = self._left = self._lane.mark()
            self._copies.append((len(blocks[chunk]), begin, self._left))

    def bring_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots to blocks, which nobody else uses any more."""
        asked = self._device.mark()
        for start in range(0, len(slots), self._pool.room_blocks):
            chunk = slice(start, start + self._pool.room_blocks)
            room = self._pool.turn(self._lane)
            begin = self._lane.mark()
            for at, first, last in _runs(slots[chunk]):
                host = self._slots[first:last].reshape(-1)
                self._lane.upload(room.address + at * self._pool.block_bytes, host)
            self._copies.append((len(blocks[chunk]), begin, self._lane.mark()))
            self._lane.after(asked)
            self._pool.scatter(self._lane, room, blocks[chunk])
            room.free = self._arrived = self._lane.mark()
        self._arriving += blocks
        self._let_past = False

    def before_step(self, block_tables: Int32) -> None:
        """The main lane's next step reads these blocks, and writes to no others: let it wait for what it needs.

        One step may pass what it does not need; the next waits, since blocks can have changed hands by then.
        """
        if self._arriving and not self._let_past and not np.isin(block_tables, self._arriving).any():
            self._let_past = True
        else:
            self.settle()

    def settle(self) -> None:
        """The main lane goes on when everything brought in is in its blocks."""
        if self._arriving:
            self._device.after(self._arrived)
            self._arriving = []

    def read(self, slots: Sequence[int]) -> Bytes:
        """(len(slots), block_bytes), once it has left the card."""
        self._left()
        return self._slots[list(slots)]

    def take_times(self) -> tuple[int, float]:
        """Blocks whose copies have ended since the last call, and the seconds that these took."""
        num_blocks, seconds = 0, 0.0
        while self._copies and (taken := self._device.elapsed_s(*self._copies[0][1:])) is not None:
            num_blocks, seconds = num_blocks + self._copies.popleft()[0], seconds + taken
        return num_blocks, seconds


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring slots that make one copy: (index of the first, its slot, the slot after the last)."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield start, slots[start], slots[end - 1] + 1
            start = end
