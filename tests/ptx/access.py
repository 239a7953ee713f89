"""How a lane's address becomes bytes of a space: address operands, windows of generic addresses, checks and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .counters import runs
from .decode import Decoder, Registers
from .errors import OutOfBounds
from .memory import GLOBAL_BASE, GLOBAL_WINDOW, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BITS, Space, instruction_text
from .modifiers import unknown
from .parser import Instruction, Mem, Operand
from .races import ATOMIC, READ, WRITE
from .scalars import Array, size_of, spread

if TYPE_CHECKING:
    from .machine import Lanes

WINDOWS = {GLOBAL_WINDOW: "global", SHARED_WINDOW: "shared", LOCAL_WINDOW: "local"}
SPACES = {"global": "global", "const": "global", "shared": "shared", "shared::cta": "shared", "local": "local"}
KINDS = {"load": READ, "store": WRITE, "atomic": ATOMIC}


@dataclass(frozen=True, slots=True)
class Target:
    """Where some lanes of a group access one space. `who`: their indices in the group, None for all of it."""

    lanes: Lanes
    instruction: Instruction
    space: str
    offset: Array  # int64, bytes in the lane's segment; one for all or one per lane of `who`
    who: Array | None

    @property
    def count(self) -> int:
        return self.lanes.n if self.who is None else len(self.who)

    @property
    def memory(self) -> Space:
        machine = self.lanes.machine
        return {"global": machine.memory, "shared": machine.shared, "local": machine.local}[self.space]

    def pick(self, values: Array) -> Array:
        """A register's values for these lanes: still one for all, or one each."""
        return values if self.who is None or len(values) == 1 else values[self.who]

    def each(self, values: Array) -> Array:
        return spread(self.pick(values), self.count)

    def locate(self, width: int) -> Array:
        """Checked flat positions, in bytes."""
        base = None
        if self.space != "global":
            base = self.pick(self.lanes.shared_base if self.space == "shared" else self.lanes.local_base)
        return self.memory.locate(self.lanes, self.instruction, self.offset, width, self.who, base)

    def observe(self, at: int, direction: str, flat: Array, width: int) -> None:
        """Count the access and log it for the race check."""
        machine = self.lanes.machine
        meter = machine.meter
        warp = self.pick(self.lanes.warp)
        sizes = self.lanes.warp_sizes if self.who is None else runs(warp)
        if self.space == "global":
            if meter:
                meter.global_access(at, direction, warp, sizes, flat, width)
            return
        if self.space == "local":
            if meter:
                meter.local_access(at, direction, sizes, width)
            return
        lane = self.pick(self.lanes.lanes)
        if meter:
            phase = lane >> {8: 4, 16: 3}.get(width, 5)
            meter.shared_access(at, direction, phase, sizes, flat, width)
        if machine.races:
            machine.races.add(at, KINDS[direction], lane, machine.sync_epoch[warp], flat, width)


class Address:
    """A decoded address operand. `targets` splits the lanes that take part by the space they reach."""

    def __init__(self, d: Decoder, i: Instruction, operand: Operand | None, space: str, width: int) -> None:
        if not isinstance(operand, Mem):
            raise unknown(i, f"address {operand}")
        self.instruction = i
        self.space = SPACES[space] if space else ""
        if self.space in ("", "shared"):
            d.shared_widths.add(width)
        self.base: Callable[[Registers], Array] | None = None
        self.origin = np.zeros(1, dtype=np.int64)
        if operand.base is not None:
            slot = d.slot(operand.base.name, i)
            kind = "u64" if size_of(d.types[slot]) == 8 else "u32"
            self.base = d.value(operand.base, kind, i)
        self.displacement = np.int64(operand.offset - (GLOBAL_BASE if self.space == "global" else 0))

    def targets(self, lanes: Lanes, R: Registers, mask: Array | None) -> Iterator[Target]:
        address = self.origin if self.base is None else self.base(R)
        address = address.view(np.int64) if address.itemsize == 8 else address.astype(np.int64)
        if self.displacement:
            address = address + self.displacement
        who: Array | None = None
        if mask is not None and not mask.all():
            who = np.flatnonzero(spread(mask, lanes.n))
            if not len(who):
                return
            address = address if len(address) == 1 else address[who]
        if self.space:
            yield Target(lanes, self.instruction, self.space, address, who)
            return
        window = address >> WINDOW_BITS
        offset = address & ((1 << WINDOW_BITS) - 1)
        if (window == window[0]).all():
            yield Target(lanes, self.instruction, self.space_of(int(window[0]), lanes, who, 0, address), offset, who)
            return
        for each in np.unique(window):
            chosen = np.flatnonzero(window == each)
            space = self.space_of(int(each), lanes, who, int(chosen[0]), address)
            yield Target(lanes, self.instruction, space, offset[chosen], chosen if who is None else who[chosen])

    def space_of(self, window: int, lanes: Lanes, who: Array | None, index: int, address: Array) -> str:
        space = WINDOWS.get(window)
        if space is None:
            lane = index if who is None else int(who[index])
            raise OutOfBounds(
                f"{lanes.where(lane)}: {instruction_text(self.instruction)}: "
                f"{int(address[index]) & ((1 << 64) - 1):#x} is not a generic address"
            )
        return space


def merge(lanes: Lanes, old: Array | None, target: Target, value: Array) -> Array:
    """A register after only the target's lanes got a value."""
    if target.who is None:
        return value
    result = np.zeros(lanes.n, dtype=value.dtype) if old is None else spread(old, lanes.n).copy()
    result[target.who] = value
    return result
