# mypy: disable-error-code="no-any-return"
"""What a launch did: instructions by line, global bytes and sectors, shared-memory wavefronts and bank conflicts.

Rules of counting. An instruction counts once per thread that executes it and once per warp with at least one such
thread. Global memory moves in 32-byte sectors: one warp access costs the distinct sectors its lanes touch. Shared
memory has 32 banks of 4 bytes; a warp access is served in phases (all 32 lanes up to 4 bytes each, half warps for 8,
quarter warps for 16; `ldmatrix` reads one 8x8 matrix, eight rows of 16 bytes, in a phase) and each phase takes as many
wavefronts as the worst bank has distinct 4-byte words.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .parser import Instruction
from .scalars import Array, spread

SECTOR = 32


@dataclass(slots=True)
class LineCount:
    """One instruction of the kernel. Fields that do not apply to it stay 0."""

    opcode: str
    line: int
    text: str
    source_line: int
    threads: int = 0
    warps: int = 0
    space: str = ""  # global | shared | local
    direction: str = ""  # load | store | atomic
    accesses: int = 0  # warp accesses of memory
    bytes: int = 0  # requested by lanes
    sectors: int = 0
    ideal_sectors: int = 0  # if each warp access were dense and aligned
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    max_ways: int = 0  # worst bank conflict of any phase: 1 is none

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal_wavefronts


@dataclass(slots=True)
class Counters:
    """The counts of one launch, or of several added up with `+`."""

    kernel: str
    lines: list[LineCount]
    seconds: float = 0.0
    blocks: int = 0
    touched_read: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)  # sector numbers
    touched_written: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)

    def __add__(self, other: Counters) -> Counters:
        """Launches one after another; their lines stay apart."""
        return Counters(
            f"{self.kernel} + {other.kernel}",
            self.lines + other.lines,
            self.seconds + other.seconds,
            self.blocks + other.blocks,
            np.union1d(self.touched_read, other.touched_read),
            np.union1d(self.touched_written, other.touched_written),
        )

    @property
    def thread_instructions(self) -> int:
        return sum(line.threads for line in self.lines)

    @property
    def warp_instructions(self) -> int:
        return sum(line.warps for line in self.lines)

    @property
    def rate(self) -> float:
        """Thread instructions interpreted per second."""
        return self.thread_instructions / self.seconds if self.seconds else 0.0

    def by_opcode(self, warps: bool = False) -> dict[str, int]:
        """Executions by opcode and leading modifiers as in `ld.global`, most frequent first."""
        totals: dict[str, int] = {}
        for line in self.lines:
            totals[line.opcode] = totals.get(line.opcode, 0) + (line.warps if warps else line.threads)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def select(self, space: str, direction: str = "") -> list[LineCount]:
        return [line for line in self.lines if line.space == space and direction in ("", line.direction)]

    def total(self, name: str, space: str, direction: str = "") -> int:
        """Sum of one field over memory instructions, e.g. total("sectors", "global", "load")."""
        return sum(int(getattr(line, name)) for line in self.select(space, direction))

    @property
    def global_load_bytes(self) -> int:
        return self.total("bytes", "global", "load")

    @property
    def global_store_bytes(self) -> int:
        return self.total("bytes", "global", "store")

    @property
    def global_load_sectors(self) -> int:
        return self.total("sectors", "global", "load")

    @property
    def global_store_sectors(self) -> int:
        return self.total("sectors", "global", "store")

    @property
    def footprint_read_bytes(self) -> int:
        """Distinct sectors read, in bytes: what must come from memory at least once."""
        return SECTOR * len(self.touched_read)

    @property
    def footprint_written_bytes(self) -> int:
        return SECTOR * len(self.touched_written)

    @property
    def max_bank_ways(self) -> int:
        return max((line.max_ways for line in self.lines), default=0)

    @property
    def shared_wavefronts(self) -> int:
        return self.total("wavefronts", "shared")

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts beyond what the same accesses would need without conflicts."""
        return sum(line.conflicts for line in self.lines)

    def table(self) -> str:
        """One row per executed PTX line."""
        rows = [f"{'line':>5} {'warps':>9} {'sectors':>9} {'ideal':>9} {'wavefr.':>9} {'ways':>4}  instruction"]
        rows.extend(
            f"{line.line:>5} {line.warps:>9} {line.sectors:>9} {line.ideal_sectors:>9} {line.wavefronts:>9} "
            f"{line.max_ways:>4}  {line.text}"
            for line in self.lines
            if line.warps
        )
        return "\n".join(rows)

    def summary(self) -> str:
        top = ", ".join(f"{name} {count}" for name, count in list(self.by_opcode(warps=True).items())[:8])
        return (
            f"{self.kernel}: {self.blocks} blocks, {self.warp_instructions} warp instructions ({top})\n"
            f"  global: {self.global_load_bytes} bytes loaded in {self.global_load_sectors} sectors, "
            f"{self.global_store_bytes} stored in {self.global_store_sectors}; "
            f"footprint {self.footprint_read_bytes} read, {self.footprint_written_bytes} written\n"
            f"  shared: {self.shared_wavefronts} wavefronts, {self.bank_conflicts} of them conflicts, "
            f"worst {self.max_bank_ways}-way\n"
            f"  interpreted {self.thread_instructions} thread instructions in {self.seconds:.3f} s "
            f"({self.rate / 1e6:.1f} million a second)"
        )


def line_of(instruction: Instruction) -> LineCount:
    spaces = ("global", "shared", "local", "param", "warp", "sync", "shared::cta")
    kept = [modifier for modifier in instruction.modifiers if modifier in spaces]
    opcode = ".".join([instruction.opcode, *kept])
    return LineCount(opcode, instruction.line, instruction.text, instruction.source_line)


def distinct(keys: Array) -> int:
    """Number of different values."""
    steps = keys[1:] - keys[:-1]
    if len(steps) and steps.min() < 0:
        keys = np.sort(keys)
        steps = keys[1:] - keys[:-1]
    return int(np.count_nonzero(steps)) + 1


def runs(warp: Array) -> Array:
    """Lengths of the runs of equal values; lanes come in order, so a warp's lanes are one run."""
    ends = np.flatnonzero(warp[1:] != warp[:-1])
    return np.diff(np.concatenate(([-1], ends, [len(warp) - 1])))


class Meter:
    """Fills the memory columns while a launch runs."""

    def __init__(self, lines: list[LineCount], global_bytes: int) -> None:
        self.lines = lines
        self.read = np.zeros(global_bytes // SECTOR + 1, dtype=np.bool_)
        self.written = np.zeros(global_bytes // SECTOR + 1, dtype=np.bool_)
        self.table = np.zeros(0, dtype=np.int64)

    def global_access(self, at: int, direction: str, warp: Array, sizes: Array, flat: Array, width: int) -> None:
        """`warp` per active lane and `sizes` lanes in each warp; `flat`, the byte offset, may be one for all."""
        line = self.lines[at]
        line.space, line.direction = "global", direction
        sector = flat // SECTOR
        if direction != "store":
            self.read[sector] = True
        if direction != "load":
            self.written[sector] = True
        line.accesses += len(sizes)
        line.bytes += len(warp) * width
        line.ideal_sectors += int(np.sum(-(-sizes * width // SECTOR)))
        line.sectors += len(sizes) if len(sector) == 1 else distinct((warp << 34) | sector)

    def local_access(self, at: int, direction: str, sizes: Array, width: int) -> None:
        line = self.lines[at]
        line.space, line.direction = "local", direction
        line.accesses += len(sizes)
        line.bytes += int(sizes.sum()) * width

    def shared_access(self, at: int, direction: str, phase: Array, sizes: Array, flat: Array, width: int) -> None:
        """`phase` numbers the groups of lanes served together; `flat` is the byte offset of each lane's access."""
        line = self.lines[at]
        line.space, line.direction = "shared", direction
        line.accesses += len(sizes)
        line.bytes += len(phase) * width
        words = max(width // 4, 1)
        word = (spread(flat, len(phase))[:, None] >> 2) + np.arange(words)
        bank = (phase[:, None] << 5) | (word & 31)
        self.table = _grown(self.table, int(phase.max() + 1) << 5)
        self.table[bank] = word
        clash = self.table[bank] != word  # another word of the same bank in the same phase
        phases = distinct(phase)
        line.ideal_wavefronts += phases
        line.wavefronts += phases
        line.max_ways = max(line.max_ways, 1)
        if clash.any():
            again = np.isin(phase, phase[clash.any(axis=1)])
            ways = _ways(phase[again], word[again])
            line.wavefronts += int(ways.sum()) - len(ways)
            line.max_ways = max(line.max_ways, int(ways.max()))


def _grown(table: Array, size: int) -> Array:
    return table if len(table) >= size else np.zeros(size, dtype=np.int64)


def _ways(phase: Array, word: Array) -> Array:
    """Per phase: the most distinct words that one bank has to deliver."""
    keys = np.sort(((phase[:, None] << 34) | word).ravel())
    keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
    load = np.bincount((keys >> 34 << 5) | (keys & 31))  # words that each bank of each phase delivers
    worst = np.resize(load, -(-len(load) // 32) * 32)
    worst[len(load) :] = 0
    worst = worst.reshape(-1, 32).max(axis=1)
    return worst[worst > 0]
