"""Bytes with a shadow: what is allocated, what has been written, what a copy in flight will overwrite.

A `Space` is flat. Shared memory has one segment per block of the running chunk, local memory one per thread, global
memory a single one; the address a thread uses is relative to its segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Misaligned, OutOfBounds, PendingCopy, PtxError, UnwrittenRead
from .scalars import Array

if TYPE_CHECKING:
    from .machine import Lanes
    from .parser import Instruction

ABSENT, UNWRITTEN, WRITTEN, PENDING = 0, 1, 2, 3
POISON = 0xFF  # what fresh memory holds: NaN in every float format, -1 as an integer

# Generic addresses: which window, hence which space, the top bits tell.
WINDOW_BITS = 40
SHARED_WINDOW, LOCAL_WINDOW, GLOBAL_WINDOW = 1, 2, 0x7F
GLOBAL_BASE = GLOBAL_WINDOW << WINDOW_BITS
GUARD = 256  # bytes of no-man's-land between global allocations

_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}
_WORDS = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)}
_PATTERNS = {
    (state, width): _WORDS[width].type(int.from_bytes(bytes([state]) * width, "little"))
    for state in (ABSENT, UNWRITTEN, WRITTEN, PENDING)
    for width in _WORDS
}


class Space:
    """`segments` x `segment_bytes` bytes. `flat` positions below are byte offsets into the whole."""

    def __init__(self, name: str, segment_bytes: int, segments: int = 1) -> None:
        self.name = name
        self.segment_bytes = segment_bytes
        total = segment_bytes * segments
        total += -total % 16
        self.data = np.zeros(total, dtype=np.uint8)
        self.state = np.zeros(total, dtype=np.uint8)
        self.data_words = {width: self.data.view(word) for width, word in _WORDS.items()}
        self.state_words = {width: self.state.view(word) for width, word in _WORDS.items()}

    def locate(
        self, lanes: Lanes, instruction: Instruction, offset: Array, width: int, who: Array | None, base: Array | None
    ) -> Array:
        """Flat positions of an access of `width` bytes at `offset` (int64, in the segment) by the lanes `who`."""
        if int(offset.view(np.uint64).max()) > self.segment_bytes - width:  # negative offsets are huge ones
            bad = (offset < 0) | (offset > self.segment_bytes - width)
            raise self.fault(OutOfBounds, lanes, instruction, who, bad, offset, width)
        if int(np.bitwise_or.reduce(offset)) & (width - 1):
            raise self.fault(Misaligned, lanes, instruction, who, offset & (width - 1) != 0, offset, width)
        return offset if base is None else offset + base

    def read(
        self, lanes: Lanes, instruction: Instruction, flat: Array, word: int, count: int, who: Array | None
    ) -> list[Array]:
        """`count` words of `word` bytes each, as unsigned integers; every byte must have been written."""
        self.check(lanes, instruction, flat, word * count, who, reading=True)
        data, index = self.data_words[word], flat >> _SHIFTS[word]
        return [data[index + k] if k else data[index] for k in range(count)]

    def write(
        self, lanes: Lanes, instruction: Instruction, flat: Array, word: int, values: list[Array], who: Array | None
    ) -> None:
        """Store unsigned words; where lanes collide, the last one wins."""
        self.check(lanes, instruction, flat, word * len(values), who, reading=False)
        data, state, index = self.data_words[word], self.state_words[word], flat >> _SHIFTS[word]
        for k, value in enumerate(values):
            data[index + k] = value
            state[index + k] = _PATTERNS[WRITTEN, word]

    def mark(self, flat: Array, width: int, state: int) -> None:
        """Set the shadow of aligned accesses of `width` bytes."""
        word = min(width, 8)
        for part in range(width // word):
            self.state_words[word][flat // word + part] = _PATTERNS[state, word]

    def check(
        self, lanes: Lanes, instruction: Instruction, flat: Array, width: int, who: Array | None, reading: bool
    ) -> None:
        word = min(width, 8)
        index = flat >> _SHIFTS[word]
        for part in range(width // word):
            state = self.state_words[word][index + part if part else index]
            good = state == _PATTERNS[WRITTEN, word]
            if not reading and not good.all():
                good |= state == _PATTERNS[UNWRITTEN, word]
            if not good.all():
                self.explain(lanes, instruction, flat + part * word, word, who, reading)

    def explain(
        self, lanes: Lanes, instruction: Instruction, flat: Array, width: int, who: Array | None, reading: bool
    ) -> None:
        """Byte by byte, now that a word was not wholly written: raise what is wrong, if anything is."""
        states = self.state[flat[..., None] + np.arange(width)]
        wrong: list[tuple[int, type[PtxError]]] = [(ABSENT, OutOfBounds), (PENDING, PendingCopy)]
        if reading:
            wrong.append((UNWRITTEN, UnwrittenRead))
        for state, error in wrong:
            bad = (states == state).any(axis=-1)
            if bad.any():
                raise self.fault(error, lanes, instruction, who, bad, flat, width)

    def fault(
        self,
        error: type[PtxError],
        lanes: Lanes,
        instruction: Instruction,
        who: Array | None,
        bad: Array,
        at: Array,
        width: int,
    ) -> PtxError:
        first = int(np.flatnonzero(bad)[0])
        lane = first if who is None else int(who[min(first, len(who) - 1)])
        position = int(at[first])
        what = {
            OutOfBounds: "outside every allocation",
            Misaligned: f"not a multiple of {width}",
            UnwrittenRead: "read before anything wrote there",
            PendingCopy: "an asynchronous copy into it was not waited for",
        }[error]
        where = lanes.where(lane)
        return error(f"{where}: {instruction_text(instruction)}: {self.name} {self.describe(position)}: {what}")

    def describe(self, position: int) -> str:
        return f"byte {position % self.segment_bytes if self.segment_bytes else position}"

    def reset(self, ranges: list[tuple[int, int]]) -> None:
        """Every segment: nothing allocated but `ranges` (start, stop), nothing written."""
        self.state[:] = ABSENT
        self.data[:] = POISON
        if self.segment_bytes:
            whole = len(self.state) // self.segment_bytes * self.segment_bytes
            segments = self.state[:whole].reshape(-1, self.segment_bytes)
            for start, stop in ranges:
                segments[:, start:stop] = UNWRITTEN


def instruction_text(instruction: Instruction) -> str:
    source = f", source line {instruction.source_line}" if instruction.source_line else ""
    return f"PTX line {instruction.line}{source}: {instruction.text}"


@dataclass(frozen=True, slots=True)
class Allocation:
    start: int
    size: int
    label: str


class GlobalSpace(Space):
    """Device memory: allocations 256-byte aligned with guard gaps; addresses start at GLOBAL_BASE."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("global", capacity_bytes)
        self.allocations: dict[int, Allocation] = {}
        self.end = GUARD

    def allocate(self, size: int, label: str, written: bool = False) -> int:
        """Byte offset of `size` fresh bytes."""
        start = self.end
        end = start + size + GUARD
        end += -end % 256
        if end > self.segment_bytes:
            raise MemoryError(f"the device holds {self.segment_bytes} bytes; give Device a larger capacity_bytes")
        self.end = end
        self.allocations[start] = Allocation(start, size, label)
        self.state[start : start + size] = WRITTEN if written else UNWRITTEN
        self.data[start : start + size] = POISON
        return start

    def free(self, start: int) -> None:
        allocation = self.allocations.pop(start)
        self.state[start : start + allocation.size] = ABSENT

    def describe(self, position: int) -> str:
        if not 0 <= position < self.segment_bytes:
            return f"address {GLOBAL_BASE + position & 0xFFFFFFFFFFFFFFFF:#x}"
        before = [a for a in self.allocations.values() if a.start <= position]
        nearest = max(before, key=lambda a: a.start, default=None)
        address = f"address {GLOBAL_BASE + position:#x}"
        if nearest is None:
            return address
        return f"{address}, byte {position - nearest.start} of {nearest.label} ({nearest.size} bytes)"


def as_words(values: Any, word: int) -> Array:
    """Any register array as unsigned words of `word` bytes."""
    array = np.asarray(values)
    return array.view(_WORDS[word])
