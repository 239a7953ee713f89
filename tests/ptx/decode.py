"""From instructions to closures: each instruction is read once, checked strictly, and becomes `step(lanes, R)`.

R is the register file of the lanes that run: R[slot] is an array of one value per lane, or of one value for all (shape
(1,)), which makes uniform arithmetic cheap. A register is held in one canonical dtype, that of its declaration (bits as
unsigned integers); operands are viewed as what an instruction wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError, UnwrittenRead
from .flatten import Program
from .flow import Block, blocks_of
from .modifiers import unknown
from .parser import Imm, Instruction, Not, Operand, Reg
from .registers import Convert, register_names, registers_known, registers_read, viewer, widener
from .scalars import UNSIGNED, Array, dtype_of, is_float

if TYPE_CHECKING:
    from .machine import Lanes

Registers = list[Any]  # Array per slot, None where nothing was written
Step = Callable[["Lanes", Registers], None]
Ready = Callable[["Lanes"], Array]
Handler = Callable[["Decoder", Instruction], Step]

HANDLERS: dict[str, Handler] = {}

# Special registers that do not change while a kernel runs; the machine fills them per launch.
SPECIAL = {
    **{f"%{name}.{axis}": "u32" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"},
    **{f"%{name}": "u32" for name in ("laneid", "warpid", "nwarpid", "smid", "nsmid", "dynamic_smem_size")},
    **{f"%{name}": "u32" for name in ("total_smem_size", "dynamic_shared")},
    **{f"%lanemask_{which}": "u32" for which in ("eq", "lt", "le", "gt", "ge")},
    "%gridid": "u64",
}
CLOCKS = {"%clock": "u32", "%clock64": "u64", "%globaltimer": "u64"}


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = handler
        return handler

    return register


@dataclass(slots=True)
class Code:
    """One basic block, decoded."""

    index: int
    steps: list[Step]
    instructions: list[Instruction]  # one per step
    positions: list[int]  # index of each of them in `Kernel.instructions`
    reads: list[list[int]]  # slots that each step reads
    needs: list[int]  # slots read here before they are written here
    writes: list[int]  # slots written here that some block needs
    end: Instruction | None
    end_position: int
    targets: tuple[int, ...]
    following: int | None
    guard: int | None  # slot of the predicate (for brx: of the index) that `end` depends on
    guard_negated: bool
    ready: Ready | None  # for meetings: which of these lanes may go on


@dataclass(slots=True)
class Decoded:
    """A program as closures, and the register slots that the launcher has to fill."""

    program: Program
    blocks: list[Code]
    instructions: list[Instruction]
    names: list[str]  # of slots
    constants: dict[int, Array]
    specials: dict[str, int]
    slots: dict[str, int]
    shared_widths: set[int] = field(default_factory=set)


class Decoder:
    """Turns one program into closures; handlers in the instructions_* modules do the work through it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots: dict[str, int] = {}
        self.names: list[str] = []
        self.types: list[str] = []
        self.constants: dict[int, Array] = {}
        self.constant_slots: dict[tuple[bytes, str], int] = {}
        self.specials: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.shared_widths: set[int] = set()
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.ready: Ready | None = None
        self.used = registers_read(program)
        self.known = registers_known(program)
        self.resolved: set[str] = set()  # names of the current instruction that stood for a literal

    @property
    def position(self) -> int:
        """Index, in the kernel's list of instructions, of the one being decoded."""
        return len(self.instructions) - 1

    def run(self) -> Decoded:
        blocks = blocks_of(self.program)
        codes = [self.block(block) for block in blocks]
        needed = {slot for code in codes for slot in code.needs}
        needed.update(code.guard for code in codes if code.guard is not None)
        for code in codes:
            code.writes = [slot for slot in code.writes if slot in needed]
        return Decoded(
            self.program,
            codes,
            self.instructions,
            self.names,
            self.constants,
            self.specials,
            self.slots,
            self.shared_widths,
        )

    def block(self, block: Block) -> Code:
        steps: list[Step] = []
        reads: list[list[int]] = []
        positions: list[int] = []
        written: dict[int, None] = {}
        needs: dict[int, None] = {}
        self.ready = None
        for instruction in block.body:
            step = self.instruction(instruction)
            steps.append(step)
            positions.append(self.position)
            reads.append(self.reads)
            needs.update((slot, None) for slot in self.reads if slot not in written)
            written.update((slot, None) for slot in self.writes)
        guard, negated, end_position = None, False, -1
        if block.end is not None:
            self.instructions.append(block.end)
            end_position = self.position
            guard, negated = self.end(block.end)
            if guard is not None and guard not in written:
                needs[guard] = None
        needs = {slot: None for slot in needs if slot not in self.constants}
        return Code(
            block.index, steps, block.body, positions, reads, list(needs), list(written), block.end, end_position,
            block.targets, block.following, guard, negated, self.ready,
        )  # fmt: skip

    def end(self, end: Instruction) -> tuple[int | None, bool]:
        self.reads, self.writes = [], []
        allowed = {"bra": {"uni", "implied"}, "brx": {"idx", "uni"}, "ret": {"uni", "implied"}}
        extra = set(end.modifiers) - allowed.get(end.opcode, set())
        if extra:
            raise unknown(end, f"modifier .{extra.pop()}")
        if end.opcode == "brx":
            if end.guard is not None:
                raise unknown(end, "a guard on brx")
            return self.source(end.operands[0], "u32", end)[0], False
        if end.guard is None:
            return None, False
        return self.slot(end.guard.name, end), isinstance(end.guard, Not)

    def instruction(self, instruction: Instruction) -> Step:
        handler = HANDLERS.get(instruction.opcode)
        if handler is None:
            raise unknown(instruction, f"opcode {instruction.opcode!r}")
        self.instructions.append(instruction)
        self.reads, self.writes, self.resolved = [], [], set()
        try:
            step = handler(self, instruction)
        except IndexError:
            raise unknown(instruction, f"{len(instruction.operands)} operands") from None
        touched = {self.names[slot] for slot in (*self.reads, *self.writes)} | self.resolved
        for operand in instruction.operands if instruction.opcode != "call" else ():
            for name in register_names(operand):
                if name not in touched and name in self.used and name not in CLOCKS:
                    raise unknown(instruction, f"operand {name}")
        return step

    # --- operands ---------------------------------------------------------------------------------------------

    def slot(self, name: str, instruction: Instruction) -> int:
        known = self.slots.get(name)
        if known is not None:
            return known
        kind = self.program.registers.get(name) or SPECIAL.get(name)
        if kind is None:
            raise unknown(instruction, f"register {name}")
        slot = self.new_slot(name, kind)
        self.slots[name] = slot
        if name in SPECIAL:
            self.specials[name] = slot
        return slot

    def new_slot(self, name: str, kind: str) -> int:
        self.names.append(name)
        self.types.append(kind)
        return len(self.names) - 1

    def constant(self, value: int | float, kind: str) -> int:
        dtype = dtype_of(kind)
        if isinstance(value, int) and dtype.kind in "ui":
            bits = value & ((1 << (8 * dtype.itemsize)) - 1)
            array = np.array([bits], dtype=UNSIGNED[dtype.itemsize]).view(dtype)
        elif dtype.kind in "ui":  # a float literal where bits are wanted
            width = dtype.itemsize
            if width not in (4, 8):
                raise PtxError(f"a float literal cannot be .{kind}")
            array = np.array([value], dtype=f"f{width}").view(dtype)
        elif dtype.kind == "f" and isinstance(value, int):  # PTX wants 0f...: an integer literal is never right here
            raise PtxError(f"integer literal {value} for a .{kind} operand")
        else:
            array = np.array([value], dtype=dtype)
        key = (array.tobytes(), dtype.str)
        if key not in self.constant_slots:
            slot = self.new_slot(str(value), kind)
            array.flags.writeable = False
            self.constant_slots[key] = slot
            self.constants[slot] = array
        return self.constant_slots[key]

    def source(self, operand: Operand | None, kind: str, instruction: Instruction) -> tuple[int, Convert | None]:
        """The slot to read, and how to see its value as `kind` (None: as it is)."""
        match operand:
            case Imm(value):
                return self.constant(value, kind), None
            case Not(name):
                if kind != "pred":
                    raise unknown(instruction, "a negated operand here")
                slot = self.slot(name, instruction)
                self.reads.append(slot)
                return slot, np.logical_not
            case Reg(name) if name in self.known and not (is_float(kind) and isinstance(self.known[name], int)):
                self.resolved.add(name)
                return self.constant(self.known[name], kind), None
            case Reg(name):
                slot = self.slot(name, instruction)
                self.reads.append(slot)
                return slot, viewer(self.types[slot], kind, instruction)
        raise unknown(instruction, f"operand {operand}")

    def result(self, operand: Operand | None, kind: str, instruction: Instruction) -> tuple[int, Convert | None]:
        """The slot to write, and how a value of `kind` is brought to the register's canonical dtype."""
        if operand is None:  # the sink
            return self.new_slot("_", kind), None
        if not isinstance(operand, Reg):
            raise unknown(instruction, f"result {operand}")
        slot = self.slot(operand.name, instruction)
        self.writes.append(slot)
        return slot, widener(kind, self.types[slot], instruction)

    def value(self, operand: Operand | None, kind: str, instruction: Instruction) -> Callable[[Registers], Array]:
        """A function that reads the operand as `kind`."""
        slot, convert = self.source(operand, kind, instruction)
        if convert is None:
            return lambda R: R[slot]
        return lambda R: convert(R[slot])

    def store(self, operand: Operand | None, kind: str, instruction: Instruction) -> Callable[[Registers, Array], None]:
        """A function that writes a value of `kind` to the register for all running lanes."""
        slot, convert = self.result(operand, kind, instruction)

        def plain(R: Registers, value: Array) -> None:
            R[slot] = value

        def converted(R: Registers, value: Array) -> None:
            assert convert is not None
            R[slot] = convert(value)

        return plain if convert is None else converted

    def literal(self, operand: Operand | None) -> int | None:
        """The value of an integer operand that is known now."""
        value = operand.value if isinstance(operand, Imm) else None
        if isinstance(operand, Reg) and operand.name in self.known:
            self.resolved.add(operand.name)
            value = self.known[operand.name]
        return value if isinstance(value, int) else None

    def is_used(self, operand: Operand | None) -> bool:
        """Whether some instruction reads this result."""
        return isinstance(operand, Reg) and operand.name in self.used

    # --- common shapes of instruction -------------------------------------------------------------------------

    def pure(
        self,
        instruction: Instruction,
        function: Callable[..., Any],
        result_kind: str,
        source_kinds: Sequence[str],
        sources: Sequence[Operand | None] | None = None,
    ) -> Step:
        """R[d] = function(R[a], ...): no side effect, so a guard is a merge of old and new."""
        operands = instruction.operands[1:] if sources is None else sources
        if len(operands) != len(source_kinds):
            raise unknown(instruction, f"{len(operands)} operands")
        read = [self.source(operand, kind, instruction) for operand, kind in zip(operands, source_kinds, strict=True)]
        d, widen = self.result(instruction.operands[0], result_kind, instruction)
        function = _converted(function, [convert for _, convert in read], widen)
        return self.guarded(instruction, _apply(function, [slot for slot, _ in read], d))

    def guarded(self, instruction: Instruction, step: Step) -> Step:
        """Let only lanes whose guard holds keep what `step` wrote."""
        if instruction.guard is None:
            return step
        predicate, _ = self.source(Reg(instruction.guard.name), "pred", instruction)
        negated = isinstance(instruction.guard, Not)
        written = list(self.writes)
        self.reads.extend(written)

        def merge(lanes: Lanes, R: Registers) -> None:
            keep = ~R[predicate] if negated else R[predicate]
            old = [R[slot] for slot in written]
            step(lanes, R)
            for slot, before in zip(written, old, strict=True):
                if before is None:
                    before = np.zeros(1, dtype=R[slot].dtype)
                R[slot] = np.where(keep, R[slot], before)

        return merge

    def mask(self, instruction: Instruction) -> Callable[[Registers], Array | None]:
        """For instructions with side effects: which lanes take part, None for all."""
        if instruction.guard is None:
            return lambda R: None
        predicate, _ = self.source(Reg(instruction.guard.name), "pred", instruction)
        if isinstance(instruction.guard, Not):
            return lambda R: ~R[predicate]
        return lambda R: R[predicate]


def _apply(function: Callable[..., Any], sources: Sequence[int], d: int) -> Step:
    def nullary(lanes: Lanes, R: Registers) -> None:
        R[d] = function()

    def unary(lanes: Lanes, R: Registers) -> None:
        R[d] = function(R[a])

    def binary(lanes: Lanes, R: Registers) -> None:
        R[d] = function(R[a], R[b])

    def ternary(lanes: Lanes, R: Registers) -> None:
        R[d] = function(R[a], R[b], R[c])

    def nary(lanes: Lanes, R: Registers) -> None:
        R[d] = function(*[R[slot] for slot in sources])

    a, b, c = (*sources, 0, 0, 0)[:3]
    return [nullary, unary, binary, ternary][len(sources)] if len(sources) < 4 else nary


def _same(x: Array) -> Array:
    return x


def _converted(
    function: Callable[..., Any], converts: Sequence[Convert | None], widen: Convert | None
) -> Callable[..., Any]:
    """`function` with its operands and its result brought to the right dtypes."""
    if widen is None and not any(converts):
        return function
    into = widen or _same
    convert = [c or _same for c in converts]
    if len(convert) == 1:
        (first,) = convert
        return lambda a: into(function(first(a)))
    if len(convert) == 2:
        first, second = convert
        return lambda a, b: into(function(first(a), second(b)))
    return lambda *args: into(function(*[c(x) for c, x in zip(convert, args, strict=True)]))


def unwritten(code: Code, at: int, R: Registers, names: list[str]) -> UnwrittenRead | None:
    """If step `at` failed because a register it reads holds nothing: that error."""
    for slot in code.reads[at]:
        if R[slot] is None:
            instruction = code.instructions[at]
            return UnwrittenRead(
                f"line {instruction.line}: {instruction.text}: register {names[slot]} was never written"
            )
    return None
