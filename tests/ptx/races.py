"""Data races on shared memory.

Accesses are logged; when threads meet at a block barrier, or the kernel ends, the interval since the last is judged.
Two accesses of the same granule by different threads, one of them a write, race unless both belong to one warp and a
`bar.warp.sync` of that warp lies between them. Atomics race with plain accesses only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import DataRace
from .memory import instruction_text
from .scalars import Array

if TYPE_CHECKING:
    from .machine import Machine

READ, WRITE, ATOMIC = 0, 1, 2
COMPACT_AT = 1 << 22  # logged accesses that make the log drop repetitions


class RaceLog:
    """One chunk of blocks. A granule is the narrowest access that the kernel makes to shared memory."""

    def __init__(self, machine: Machine, shared_bytes: int, granule: int) -> None:
        self.machine = machine
        self.granule = granule
        self.owner = np.full(max(shared_bytes // granule, 1), -1, dtype=np.int64)
        self.entries: list[Array] = []
        self.size = 0

    def add(self, at: int, kind: int, lane: Array, epoch: Array, flat: Array, width: int) -> None:
        """Log an access by instruction number `at`: per lane its number, its warp's epoch, and the first byte."""
        count = max(width // self.granule, 1)
        granule = (flat // self.granule)[:, None] + np.arange(count)
        entry = np.empty((5, granule.size), dtype=np.int64)
        entry[0] = granule.ravel()
        entry[1] = np.repeat(lane, count)
        entry[2] = np.repeat(epoch, count)
        entry[3] = kind
        entry[4] = at
        self.entries.append(entry)
        self.size += granule.size
        if self.size > COMPACT_AT:
            self.entries = [np.unique(np.concatenate(self.entries, axis=1), axis=1)]
            self.size = self.entries[0].shape[1]

    def settle(self, blocks: Array | None) -> None:
        """The blocks (None: all of the chunk) passed a barrier: judge what they did before it and forget it."""
        if not self.entries:
            return
        log = self.entries[0] if len(self.entries) == 1 else np.concatenate(self.entries, axis=1)
        self.entries, self.size = [], 0
        if blocks is not None:
            mine = np.isin(log[1] // self.machine.lanes_per_block, blocks)
            if not mine.all():
                self.entries = [log[:, ~mine]]
                self.size = self.entries[0].shape[1]
                log = log[:, mine]
        self.judge(log)

    def judge(self, log: Array) -> None:
        granule, lane, epoch, kind, _ = log
        suspects = self.clashes(granule, lane, kind)
        if not suspects.any():
            return
        log = log[:, np.isin(granule, granule[suspects])]
        granule, lane, epoch, kind, _ = log
        warp = lane >> 5
        across = self.clashes(granule, warp, kind)
        if across.any():
            self.report(log, np.ones(log.shape[1], dtype=np.bool_), granule[across][0], across=True)
        _, within = np.unique(np.stack((granule, warp, epoch)), axis=1, return_inverse=True)
        within = within.reshape(-1)
        clash = self.clashes(within, lane, kind)
        if clash.any():
            same = within == within[clash][0]
            self.report(log, same, granule[clash][0], across=False)

    def clashes(self, place: Array, who: Array, kind: Array) -> Array:
        """Which accesses share their place with a write by another (or an atomic, if they are none)."""
        owner = self.owner if place.max(initial=0) < len(self.owner) else np.full(int(place.max()) + 1, -1)
        result = np.zeros(len(place), dtype=np.bool_)
        for mark, others in ((WRITE, kind >= READ), (ATOMIC, kind != ATOMIC)):
            marking = kind == mark
            if not marking.any():
                continue
            owner[place[marking]] = who[marking]
            found = owner[place]
            result |= others & (found >= 0) & (found != who)
            owner[place[marking]] = -1
        return result

    def report(self, log: Array, among: Array, granule: int, across: bool) -> None:
        """Name two accesses that clash."""
        _, lane, _, kind, at = log[:, among & (log[0] == granule)]
        writes = np.flatnonzero(kind != READ)
        for one in writes[::-1]:
            differ = (lane >> 5) != (lane[one] >> 5) if across else lane != lane[one]
            other = np.flatnonzero(differ & ((kind != ATOMIC) | (kind[one] != ATOMIC)))
            if len(other):
                break
        two = other[0]
        byte = int(granule) * self.granule % self.machine.shared.segment_bytes
        first, second = sorted((int(one), int(two)), key=lambda index: int(at[index]))
        texts = [
            f"{self.machine.where(int(lane[index]))} {('reads', 'writes', 'updates')[kind[index]]} it at "
            f"{instruction_text(self.machine.instructions[int(at[index])])}"
            for index in (first, second)
        ]
        raise DataRace(f"shared byte {byte}: {texts[0]}; and {texts[1]}; no barrier orders them")
