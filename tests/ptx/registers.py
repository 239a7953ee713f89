"""Registers: in which dtype each is held and how an instruction sees it; what the program reads, sets, and knows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .flatten import Program
from .modifiers import unknown
from .parser import Imm, Instruction, Mem, Not, Operand, Pair, Reg, Vec
from .scalars import UNSIGNED, Array, dtype_of, is_float, size_of

Convert = Callable[[Array], Array]


def viewer(register: str, wanted: str, instruction: Instruction) -> Convert | None:
    have, want = dtype_of(canonical(register)), dtype_of(wanted)
    if have == want:
        return None
    if "pred" in (register, wanted) or have.itemsize < want.itemsize:
        raise unknown(instruction, f"a .{register} register as .{wanted}")
    if have.itemsize == want.itemsize:
        return lambda x: x.view(want)
    if have.kind == "f" or want.kind == "f":
        raise unknown(instruction, f"a .{register} register as .{wanted}")
    narrow = UNSIGNED[want.itemsize]
    return (lambda x: x.astype(narrow)) if narrow == want else (lambda x: x.astype(narrow).view(want))


def widener(kind: str, register: str, instruction: Instruction) -> Convert | None:
    have, want = dtype_of(kind), dtype_of(canonical(register))
    if have == want:
        return None
    if "pred" in (register, kind) or have.itemsize > want.itemsize:
        raise unknown(instruction, f"a .{kind} result in a .{register} register")
    if have.itemsize == want.itemsize:
        return lambda x: x.view(want)
    if have.kind == "f" or want.kind == "f":
        raise unknown(instruction, f"a .{kind} result in a .{register} register")
    if have.kind == "i":
        wide = np.dtype(f"i{want.itemsize}")
        return lambda x: x.astype(wide).view(want)
    return lambda x: x.astype(want)


def canonical(register: str) -> str:
    """The type whose dtype a register of this declared type is held in."""
    if register == "pred" or is_float(register):
        return register
    return {1: "b8", 2: "b16", 4: "b32", 8: "b64"}[size_of(register)]


def register_names(operand: Operand | None) -> list[str]:
    """Every register that an operand mentions."""
    match operand:
        case Reg(name) | Not(name) | Mem(Reg(name), _):
            return [name]
        case Vec(items):
            return [name for item in items for name in register_names(item)]
        case Pair(first, second):
            return [*register_names(first), *register_names(second)]
    return []


def registers_read(program: Program) -> set[str]:
    """Names that appear anywhere but as the first operand, which is the result."""
    read: set[str] = set()
    for item in program.code:
        if isinstance(item, Instruction):
            skip = 1 if item.operands and isinstance(item.operands[0], Reg) and item.opcode != "st" else 0
            for operand in item.operands[skip:]:
                read.update(register_names(operand))
            if item.guard is not None:
                read.add(item.guard.name)
    return read


def registers_known(program: Program) -> dict[str, int | float]:
    """Registers that are set once, by moving a literal into them: compilers keep immediate operands there."""
    counts: dict[str, int] = {}
    values: dict[str, int | float] = {}
    for item in program.code:
        if not isinstance(item, Instruction) or not item.operands:
            continue
        for name in register_names(item.operands[0]):
            counts[name] = counts.get(name, 0) + 1
        match item:
            case Instruction(opcode="mov", guard=None, operands=(Reg(name), Imm(value))):
                values[name] = value
    return {name: value for name, value in values.items() if counts[name] == 1}
