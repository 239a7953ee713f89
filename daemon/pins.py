"""Prefixes that their owner wants kept: a pin holds references to cached blocks, under a quota, until it ends."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class _Pin:
    uid: int
    blocks: list[int]
    expires_at: float | None  # monotonic seconds


class Pins:
    """References to blocks that belong to no sequence. They are charged to whoever pinned."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[int, _Pin] = {}
        self._expiry: list[tuple[float, int]] = []  # heap of (monotonic seconds, pin id)
        self._next_id = 1

    def blocks_of(self, uid: int) -> int:
        """Blocks pinned by `uid`; one that it pinned twice counts twice."""
        return sum(len(pin.blocks) for pin in self._pins.values() if pin.uid == uid)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks pinned."""
        return len(self.references())

    def references(self) -> dict[int, int]:
        """How many pins hold each pinned block."""
        counts: dict[int, int] = {}
        for pin in self._pins.values():
            for block in pin.blocks:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def add(self, uid: int, blocks: list[int], expires_at: float | None) -> int:
        """Pin `blocks`; the id is for `remove`."""
        for block in blocks:
            self._pool.share(block, uid)
        pin_id = self._next_id
        self._next_id += 1
        self._pins[pin_id] = _Pin(uid, list(blocks), expires_at)
        if expires_at is not None:
            heapq.heappush(self._expiry, (expires_at, pin_id))
        return pin_id

    def owner(self, pin_id: int) -> int | None:
        """Who pinned; None if there is no such pin (any more)."""
        pin = self._pins.get(pin_id)
        return pin.uid if pin else None

    def of(self, uid: int) -> list[tuple[int, int, float | None]]:
        """The pins of `uid`: id, number of blocks, and when they end."""
        return [(pin_id, len(pin.blocks), pin.expires_at) for pin_id, pin in self._pins.items() if pin.uid == uid]

    def remove(self, pin_id: int) -> bool:
        """Let go of a pin's blocks; False if it had ended already."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._pool.release_all(pin.blocks, pin.uid)
        return pin is not None

    def expire(self, now: float) -> None:
        """Let go of the pins whose time is over."""
        while self._expiry and self._expiry[0][0] <= now:
            self.remove(heapq.heappop(self._expiry)[1])
