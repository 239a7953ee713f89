# mypy: disable-error-code="no-any-return"
"""Runs one launch: blocks in chunks, all threads of a chunk in lockstep where they agree, by groups where they do not.

Lanes are numbered block by block, each block padded to whole warps. `pc` holds the basic block at which every lane
waits; the scheduler runs the group at the lowest one (see flow.py) until it would pass another group, diverges, or has
to wait at a meeting (barrier, shuffle, mma) for lanes that are still behind.
"""

from __future__ import annotations

from functools import cached_property
from operator import length_hint
from typing import Any

import numpy as np

from .counters import Meter, line_of, runs
from .decode import Code, Decoded, Registers, unwritten
from .errors import BarrierError, ParticipationError, PtxError, Timeout, Trap
from .memory import GlobalSpace, Space, instruction_text
from .races import RaceLog
from .scalars import Array, spread

WARP = 32
Dim3 = tuple[int, int, int]


class Lanes:
    """A group of lanes that run together, with their registers."""

    def __init__(self, machine: Machine, lanes: Array) -> None:
        self.machine = machine
        self.lanes = lanes  # (n,) int64, ascending
        self.n = len(lanes)
        self.full = self.n == machine.num_lanes
        self.R: Registers = machine.R if self.full else machine.fresh_registers()
        self.prepared: set[int] = set()
        self.dirty: dict[int, None] = {}

    @cached_property
    def warp(self) -> Array:
        """(n,) warp of each lane, numbered through the chunk."""
        return self.lanes >> 5

    @cached_property
    def lane_in_warp(self) -> Array:
        return self.lanes & 31

    @cached_property
    def block(self) -> Array:
        """(n,) block of each lane, numbered in the chunk."""
        return self.lanes // self.machine.lanes_per_block

    @cached_property
    def warp_sizes(self) -> Array:
        """(warps,) how many lanes of each warp that takes part."""
        return runs(self.warp)

    @property
    def num_warps(self) -> int:
        return len(self.warp_sizes)

    @cached_property
    def active(self) -> Array:
        """(n,) uint32: which lanes of its warp run together with this one."""
        return self.machine.members(self.lanes)[self.warp]

    @cached_property
    def shared_base(self) -> Array:
        return self.block * self.machine.shared.segment_bytes

    @cached_property
    def local_base(self) -> Array:
        return self.lanes * self.machine.local.segment_bytes

    def peek(self, slot: int) -> Array:
        """A register before any block of this group has asked for it."""
        value = self.R[slot] if self.R[slot] is not None else self.machine.R[slot]
        if value is None or len(value) == 1 or len(value) == self.n:
            return np.zeros(1, dtype=np.uint32) if value is None else value
        return value[self.lanes]

    def spread(self, value: Array) -> Array:
        """One value per lane."""
        return spread(value, self.n)

    def where(self, index: int) -> str:
        return self.machine.where(int(self.lanes[index]))


class Machine:
    """State of a launch. `run` executes it; the Device owns global memory and reads the counts."""

    def __init__(
        self,
        kernel: Decoded,
        memory: GlobalSpace,
        grid: Dim3,
        block: Dim3,
        dynamic_shared_bytes: int,
        values: dict[str, Array],
        lanes_at_once: int,
        max_steps: int,
        count: bool,
        check_races: bool,
    ) -> None:
        self.kernel = kernel
        self.instructions = kernel.instructions
        self.blocks = kernel.blocks
        self.exit = len(kernel.blocks)
        self.memory = memory
        self.grid, self.block_dim = grid, block
        self.threads_per_block = block[0] * block[1] * block[2]
        self.lanes_per_block = -(-self.threads_per_block // WARP) * WARP
        self.num_blocks = grid[0] * grid[1] * grid[2]
        self.chunk_blocks = max(1, min(lanes_at_once // self.lanes_per_block, self.num_blocks))
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.values = values
        self.max_steps = max_steps
        self.lines = [line_of(instruction) for instruction in kernel.instructions]
        self.meter = Meter(self.lines, memory.end) if count else None
        self.check_races = check_races
        self.clock = 0
        self.block_threads = [0] * self.exit
        self.block_warps = [0] * self.exit

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for first in range(0, self.num_blocks, self.chunk_blocks):
                self.start_chunk(first, min(self.chunk_blocks, self.num_blocks - first))
                self.loop()
                if self.races:
                    self.races.settle(None)
        for code in self.blocks:
            for position in (*code.positions, code.end_position):
                if position >= 0:
                    self.lines[position].threads += self.block_threads[code.index]
                    self.lines[position].warps += self.block_warps[code.index]

    # --- a chunk of blocks ------------------------------------------------------------------------------------

    def start_chunk(self, first: int, count: int) -> None:
        self.first_block = first
        self.num_lanes = count * self.lanes_per_block
        lane = np.arange(self.num_lanes)
        self.thread = lane % self.lanes_per_block
        self.pc = np.where(self.thread < self.threads_per_block, 0, self.exit)
        self.current: Lanes | None = None
        self.forget_live()
        self.R = self.fresh_registers()
        self.start_memory(count)
        self.committed = np.zeros(self.num_lanes, dtype=np.int64)  # cp.async groups closed, per lane
        self.copies: list[Any] = []  # copies in flight, see instructions_async.py
        self.sync_epoch = np.zeros(self.num_lanes // WARP, dtype=np.int64)  # bar.warp.syncs per warp
        for name, slot in self.kernel.specials.items():
            self.R[slot] = self.special(name, lane)
        for name, value in self.values.items():
            if name in self.kernel.slots:
                self.R[self.kernel.slots[name]] = value

    def start_memory(self, blocks: int) -> None:
        program = self.kernel.program
        dynamic = (program.dynamic_shared_offset, program.dynamic_shared_offset + self.dynamic_shared_bytes)
        size = dynamic[1] + -dynamic[1] % 128
        ranges = [(start, start + length) for start, length in program.shared.values()]
        self.shared = Space("shared", size, blocks)
        self.shared.reset([*ranges, dynamic])
        self.local = Space("local", program.local_bytes, self.num_lanes if program.local_bytes else 0)
        self.local.reset([(0, program.local_bytes)])
        widths = self.kernel.shared_widths
        self.races = RaceLog(self, len(self.shared.data), min(widths)) if self.check_races and widths and size else None

    def fresh_registers(self) -> Registers:
        registers: Registers = [None] * len(self.kernel.names)
        for slot, value in self.kernel.constants.items():
            registers[slot] = value
        return registers

    def special(self, name: str, lane: Array) -> Array:
        """A special register, per lane or the same for all."""
        kind, _, axis = name[1:].partition(".")
        x, y, _ = self.block_dim
        value: Array
        if kind == "tid":
            strides = {"x": (1, x), "y": (x, y), "z": (x * y, self.threads_per_block)}
            stride, size = strides[axis]
            value = self.thread // stride % size
        elif kind == "ctaid":
            block = self.first_block + lane // self.lanes_per_block
            gx, gy, _ = self.grid
            value = {"x": block % gx, "y": block // gx % gy, "z": block // (gx * gy)}[axis]
            value = value[:1] if self.num_lanes == self.lanes_per_block else value
        elif kind in ("ntid", "nctaid"):
            value = np.array([(self.block_dim if kind == "ntid" else self.grid)["xyz".index(axis)]])
        elif kind == "laneid":
            value = lane & 31
        elif kind == "warpid":
            value = self.thread >> 5
        elif kind.startswith("lanemask_"):
            bit = np.uint64(1) << (lane & 31).astype(np.uint64)
            one = np.uint64(1)
            masks = {"eq": bit, "lt": bit - one, "le": 2 * bit - one, "gt": ~(2 * bit - one), "ge": ~(bit - one)}
            value = masks[kind[-2:]] & np.uint64(0xFFFFFFFF)
        else:
            constants = {
                "dynamic_smem_size": self.dynamic_shared_bytes,
                "total_smem_size": self.shared.segment_bytes,
                "dynamic_shared": self.kernel.program.dynamic_shared_offset,
                "nwarpid": self.lanes_per_block // WARP,
                "nsmid": 1,
            }
            value = np.array([constants.get(kind, 0)])
        return value.astype(np.uint64 if name == "%gridid" else np.uint32)

    # --- scheduling -------------------------------------------------------------------------------------------

    def loop(self) -> None:
        while (chosen := self.choose()) is not None:
            lanes, code, horizon = chosen
            while True:
                target = self.execute(lanes, code)
                if not isinstance(target, int) or target >= self.exit:
                    break
                ready = self.blocks[target].ready
                if target >= horizon or not (ready is None or ready(lanes).all()):
                    break
                code = self.blocks[target]
            self.pc[lanes.lanes] = target
            if not isinstance(target, int) or target == self.exit:
                self.forget_live()

    def choose(self) -> tuple[Lanes, Code, int] | None:
        """The next group, its block, and the position before which it may run on without looking again."""
        places = np.flatnonzero(np.bincount(self.pc))
        for order, place in enumerate(places):
            if place == self.exit:
                break
            members = np.flatnonzero(self.pc == place)
            code = self.blocks[place]
            lanes = self.group(members)
            if code.ready is not None:
                ready = code.ready(lanes)
                if not ready.any():
                    continue
                if not ready.all():
                    lanes = self.group(members[lanes.spread(ready)])
            horizon = int(places[order + 1]) if order + 1 < len(places) else self.exit
            return lanes, code, horizon
        if places[0] == self.exit:
            return None
        raise self.stuck(int(places[0]))

    def group(self, members: Array) -> Lanes:
        """The registers of these lanes; what the last group computed goes back to the common file first."""
        current = self.current
        if current is not None:
            if current.n == len(members) and np.array_equal(current.lanes, members):
                return current
            self.put_back(current)
        self.current = Lanes(self, members)
        return self.current

    def put_back(self, lanes: Lanes) -> None:
        if lanes.full:
            return
        for slot in lanes.dirty:
            value = lanes.R[slot]
            common = self.R[slot]
            if common is None:
                common = np.zeros(self.num_lanes, dtype=value.dtype)
            else:
                common = spread(common, self.num_lanes).copy()  # other registers may share the array
            common[lanes.lanes] = value
            self.R[slot] = common

    def prepare(self, lanes: Lanes, code: Code) -> None:
        """Fetch the registers this block needs; note those it changes."""
        lanes.prepared.add(code.index)
        for slot in code.needs:
            if lanes.R[slot] is None:
                common = self.R[slot]
                if common is not None:
                    lanes.R[slot] = common if len(common) == 1 else common[lanes.lanes]
        lanes.dirty.update((slot, None) for slot in code.writes)

    def execute(self, lanes: Lanes, code: Code) -> int | Array:
        """One basic block for these lanes. Returns where they go: one place, or one per lane."""
        if not lanes.full and code.index not in lanes.prepared:
            self.prepare(lanes, code)
        self.block_threads[code.index] += lanes.n
        self.block_warps[code.index] += lanes.num_warps
        self.clock += 1
        if self.clock > self.max_steps:
            raise Timeout(
                f"{lanes.where(0)}: more than {self.max_steps} basic blocks; raise max_steps or see if it loops"
            )
        R = lanes.R
        steps = iter(code.steps)
        try:
            for step in steps:
                step(lanes, R)
            return self.leave(lanes, code, R)
        except PtxError:
            raise
        except (TypeError, AttributeError, ValueError, IndexError) as error:
            at = len(code.steps) - 1 - length_hint(steps)
            better = unwritten(code, at, R, self.kernel.names) if at >= 0 else None
            if better is not None:
                raise better from None
            if at >= 0:
                error.add_note(f"while interpreting {instruction_text(code.instructions[at])}")
            raise

    def leave(self, lanes: Lanes, code: Code, R: Registers) -> int | Array:
        end = code.end
        if end is None:
            return code.following if code.following is not None else self.exit
        if end.opcode == "trap":
            if code.guard is None or bool(np.any(R[code.guard] != code.guard_negated)):
                raise Trap(f"{lanes.where(0)}: {instruction_text(end)}")
            return code.following if code.following is not None else self.exit
        if end.opcode == "brx":
            table = np.array(code.targets)
            assert code.guard is not None
            index = R[code.guard]
            if (index >= len(table)).any():
                raise Trap(f"{lanes.where(0)}: {instruction_text(end)}: index outside the table")
            chosen = table[index]
            return int(chosen[0]) if (chosen == chosen[0]).all() else lanes.spread(chosen)
        taken = code.targets[0] if code.targets else self.exit
        if code.guard is None:
            return taken
        following = code.following if code.following is not None else self.exit
        if code.guard_negated:
            taken, following = following, taken
        predicate = R[code.guard]
        count = np.count_nonzero(predicate)
        if count == 0:
            return following
        if count == len(predicate):
            return taken
        return np.where(predicate, taken, following)

    # --- who is where -----------------------------------------------------------------------------------------

    def members(self, lanes: Array) -> Array:
        """(warps,) uint32: bit l is set where lane l of the warp is among `lanes`."""
        flags = np.zeros(self.num_lanes, dtype=np.uint8)
        flags[lanes] = 1
        return np.packbits(flags, bitorder="little").view(np.uint32)

    def forget_live(self) -> None:
        for name in ("alive", "num_live", "live_per_block"):
            self.__dict__.pop(name, None)

    @cached_property
    def alive(self) -> Array:
        """(warps,) uint32: lanes that have not exited. This and the next two are forgotten when lanes exit."""
        return self.members(np.flatnonzero(self.pc != self.exit))

    @cached_property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.pc != self.exit))

    @cached_property
    def live_per_block(self) -> Array:
        live = np.flatnonzero(self.pc != self.exit)
        return np.bincount(live // self.lanes_per_block, minlength=self.num_lanes // self.lanes_per_block)

    def where(self, lane: int) -> str:
        thread = int(self.thread[lane])
        block = self.first_block + lane // self.lanes_per_block
        x, y, _ = self.block_dim
        gx, gy, _ = self.grid
        return (
            f"block ({block % gx}, {block // gx % gy}, {block // (gx * gy)}) "
            f"thread ({thread % x}, {thread // x % y}, {thread // (x * y)})"
        )

    def stuck(self, place: int) -> PtxError:
        """Nobody can go on: threads wait at a meeting for others that are elsewhere or gone."""
        waiting = np.flatnonzero(self.pc == place)
        meeting = self.blocks[place].instructions[0]
        first = int(waiting[0])
        scope = (
            self.lanes_per_block if meeting.opcode in ("bar", "barrier") and "warp" not in meeting.modifiers else WARP
        )
        near = np.arange(first // scope * scope, first // scope * scope + scope)
        near = near[(self.thread[near] < self.threads_per_block) & (self.pc[near] != place)]
        elsewhere = "lanes that do not exist in this block"
        if len(near):
            other = int(near[0])
            state = "has exited"
            if self.pc[other] != self.exit:
                state = f"waits at {instruction_text(self.blocks[self.pc[other]].instructions[0])}"
            elsewhere = f"{self.where(other)}, which {state}"
        error = BarrierError if scope != WARP else ParticipationError
        return error(f"{self.where(first)}: {instruction_text(meeting)}: waits for {elsewhere}")
