"""Prefixes that their owner wants kept: a pin holds references to cached blocks, under a quota, until it ends."""

from __future__ import annotations

from collections import Counter
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
        self._references: Counter[int] = Counter()  # by block
        self._blocks_of: Counter[int] = Counter()  # by uid
        self._next_id = 1
        self.next_expiry: float | None = None  # monotonic seconds; no pin ends by itself before it

    def blocks_of(self, uid: int) -> int:
        """Blocks pinned by `uid`; one that it pinned twice counts twice."""
        return self._blocks_of[uid]

    @property
    def num_blocks(self) -> int:
        """Distinct blocks pinned."""
        return len(self._references)

    def references(self) -> Counter[int]:
        """How many pins hold each pinned block."""
        return self._references.copy()

    def add(self, uid: int, blocks: list[int], expires_at: float | None) -> int:
        """Pin `blocks`; the id is for `remove`."""
        for block in blocks:
            self._pool.share(block, uid)
        pin_id = self._next_id
        self._next_id += 1
        self._pins[pin_id] = _Pin(uid, list(blocks), expires_at)
        self._references.update(blocks)
        self._blocks_of[uid] += len(blocks)
        if expires_at is not None:
            self.next_expiry = expires_at if self.next_expiry is None else min(self.next_expiry, expires_at)
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
        if pin is None:
            return False
        for block in pin.blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
        self._blocks_of[pin.uid] -= len(pin.blocks)
        self._pool.release_all(pin.blocks, pin.uid)
        return True

    def expire(self, now: float) -> None:
        """Let go of the pins whose time is over."""
        if self.next_expiry is None or now < self.next_expiry:
            return
        times = {pin_id: pin.expires_at for pin_id, pin in self._pins.items() if pin.expires_at is not None}
        for pin_id, expires_at in times.items():
            if expires_at <= now:
                self.remove(pin_id)
        self.next_expiry = min((at for at in times.values() if at > now), default=None)
