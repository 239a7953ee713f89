"""From a parsed module to one flat list of instructions with unique names, ready to be cut into basic blocks.

Scopes are resolved, device functions are expanded at each call site (there is no recursion on this path), parameters
become registers ("cells", one per offset), and shared and local variables get their addresses.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .errors import PtxSyntaxError, UnknownInstruction
from .parser import (
    Branchtargets,
    Declaration,
    Function,
    Imm,
    Instruction,
    Label,
    Mem,
    Module,
    Names,
    Not,
    Operand,
    Pair,
    Reg,
    Scope,
    Statement,
    Vec,
)
from .scalars import size_of

SHARED_GAP = 128  # bytes between shared variables: one full turn of the banks, so that conflicts stay as on the chip
MAX_CALL_DEPTH = 32

Flat = Instruction | Label | Branchtargets


@dataclass(frozen=True, slots=True)
class ParamCell:
    """A kernel parameter, or a piece of one, that the launcher puts into a register."""

    register: str
    offset: int  # bytes into the parameter buffer
    type: str


@dataclass(slots=True)
class Program:
    """One kernel, flat."""

    name: str
    code: list[Flat] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # unique name -> PTX type
    params: list[Declaration] = field(default_factory=list)
    param_offsets: list[int] = field(default_factory=list)
    param_bytes: int = 0
    param_cells: dict[str, ParamCell] = field(default_factory=dict)
    globals: dict[str, Declaration] = field(default_factory=dict)  # register "&name" holds the address
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (offset, bytes)
    dynamic_shared_offset: int = 0
    local_bytes: int = 0
    max_threads: int = 0


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def flatten(module: Module, entry: str | None = None) -> Program:
    """Raises UnknownInstruction for recursion and for what cannot be expanded."""
    function = module.entry(entry)
    program = Program(function.name, max_threads=function.max_threads)
    names: ChainMap[str, _Binding] = ChainMap()
    _Flattener(module, program).entry(function, names)
    return program


@dataclass(frozen=True, slots=True)
class _Binding:
    """What a name means here: reg, label, cell (parameter), shared, local or global."""

    kind: str
    name: str
    address: int = 0


class _Flattener:
    def __init__(self, module: Module, program: Program) -> None:
        self.module = module
        self.program = program
        self.instances = 0
        self.dynamic: list[Declaration] = []
        self.shared_end = 0

    def entry(self, function: Function, names: ChainMap[str, _Binding]) -> None:
        used = _names_used(self.module)
        for variable in self.module.variables.values():
            if variable.name in used:
                names[variable.name] = self.variable(variable, variable.name)
        offset = 0
        for param in function.params:
            offset = align_up(offset, param.alignment)
            self.program.params.append(param)
            self.program.param_offsets.append(offset)
            names[param.name] = _Binding("cell", param.name, offset)
            offset += param.size
        self.program.param_bytes = offset
        self.body(function.body or [], names.new_child(), "", None, 0)
        self.program.dynamic_shared_offset = align_up(self.shared_end, 16)

    def variable(self, variable: Declaration, unique: str) -> _Binding:
        if variable.space == "shared":
            if variable.count == 0:
                return _Binding("dynamic", unique)
            start = align_up(self.shared_end, variable.alignment)
            self.program.shared[unique] = (start, variable.size)
            self.shared_end = start + variable.size + SHARED_GAP
            return _Binding("shared", unique, start)
        if variable.space == "local":
            start = align_up(self.program.local_bytes, max(variable.alignment, 16))
            self.program.local_bytes = start + align_up(variable.size, 16)
            return _Binding("local", unique, start)
        self.program.globals[unique] = variable
        self.program.registers["&" + unique] = "u64"
        return _Binding("global", "&" + unique)

    def body(
        self, statements: list[Statement], names: ChainMap[str, _Binding], prefix: str, end: str | None, depth: int
    ) -> None:
        """`end` is the label behind the call this body was expanded for; None for the kernel itself."""
        self.bind(statements, names, prefix)
        for statement in statements:
            match statement:
                case Scope(body):
                    self.instances += 1
                    self.body(body, names.new_child(), f"{prefix}{{{self.instances}}}", end, depth)
                case Label(name):
                    self.program.code.append(Label(names[name].name))
                case Branchtargets(name, labels):
                    targets = tuple(names[label].name for label in labels)
                    self.program.code.append(Branchtargets(names[name].name, targets))
                case Instruction(opcode="call"):
                    self.call(statement, names, depth)
                case Instruction():
                    self.program.code.append(self.resolve(statement, names, end))

    def bind(self, statements: list[Statement], names: ChainMap[str, _Binding], prefix: str) -> None:
        for statement in statements:
            match statement:
                case Declaration(space="reg"):
                    unique = prefix + statement.name
                    self.program.registers[unique] = statement.type
                    names[statement.name] = _Binding("reg", unique)
                case Declaration(space="param"):
                    names[statement.name] = _Binding("cell", prefix + statement.name, -1)
                case Declaration():
                    names[statement.name] = self.variable(statement, prefix + statement.name)
                case Label(name) | Branchtargets(name, _):
                    names[name] = _Binding("label", prefix + name)

    def call(self, instruction: Instruction, names: ChainMap[str, _Binding], depth: int) -> None:
        lists = [operand.names for operand in instruction.operands if isinstance(operand, Names)]
        target = next((operand for operand in instruction.operands if isinstance(operand, Reg)), None)
        callee = self.module.functions.get(target.name) if target else None
        if target is None or (callee is None and target.name in names):
            raise UnknownInstruction(f"line {instruction.line}: call through a register: {instruction.text}")
        if callee is None or callee.body is None:  # an error only if it is ever executed
            self.program.code.append(replace(instruction, operands=(target,)))
            return
        if depth > MAX_CALL_DEPTH:
            raise UnknownInstruction(f"line {instruction.line}: recursion: {instruction.text}")
        has_results = isinstance(instruction.operands[0], Names)
        results = lists.pop(0) if has_results else ()
        arguments = lists.pop(0) if lists else ()
        if instruction.guard is not None or len(callee.params) != len(arguments) or len(callee.results) != len(results):
            raise UnknownInstruction(f"line {instruction.line}: unsupported form of call: {instruction.text}")
        self.instances += 1
        prefix = f"{callee.name}#{self.instances}:"
        inner: ChainMap[str, _Binding] = ChainMap({}, *names.maps[-1:])
        for formal, actual in zip([*callee.params, *callee.results], [*arguments, *results], strict=True):
            if names[actual].kind != "cell":
                raise UnknownInstruction(f"line {instruction.line}: call with register arguments: {instruction.text}")
            inner[formal.name] = names[actual]
        end = prefix + "return"
        self.program.code.append(replace(instruction, operands=(), modifiers=("inlined",)))
        self.body(callee.body, inner.new_child(), prefix, end, depth + 1)
        self.program.code.append(Label(end))

    def resolve(self, instruction: Instruction, names: ChainMap[str, _Binding], end: str | None) -> Instruction:
        guard = instruction.guard
        if guard is not None:
            resolved = self.name(guard.name, names, instruction)
            if not isinstance(resolved, Reg):
                raise PtxSyntaxError(f"line {instruction.line}: guard is not a register: {instruction.text}")
            guard = Not(resolved.name) if isinstance(guard, Not) else resolved
        operands = tuple(self.operand(operand, names, instruction) for operand in instruction.operands)
        if instruction.opcode == "ret" and end is not None:
            operands = (Reg(end),)
        text = instruction.text.replace(f"{self.program.name}_param_", "param_")  # Numba's names are very long
        return replace(instruction, operands=operands, guard=guard, text=text)

    def operand(
        self, operand: Operand | None, names: ChainMap[str, _Binding], instruction: Instruction
    ) -> Operand | None:
        match operand:
            case Reg(name):
                return self.name(name, names, instruction)
            case Not(name):
                inner = self.name(name, names, instruction)
                return Not(inner.name if isinstance(inner, Reg) else name)
            case Vec(items):
                return Vec(tuple(self.operand(item, names, instruction) for item in items))
            case Pair(first, second):
                return Pair(self.operand(first, names, instruction), self.operand(second, names, instruction))
            case Mem(Reg(name), offset):
                return self.address(name, offset, names, instruction)
        return operand

    def name(self, name: str, names: ChainMap[str, _Binding], instruction: Instruction) -> Operand:
        binding = names.get(name)
        if binding is None:
            if name.startswith("%") or name == "WARP_SZ":
                return Imm(32) if name == "WARP_SZ" else Reg(name)  # a special register; decoding knows which exist
            raise PtxSyntaxError(f"line {instruction.line}: unknown name {name!r} in {instruction.text}")
        if binding.kind in ("reg", "label", "global"):
            return Reg(binding.name)
        if binding.kind == "cell":
            raise UnknownInstruction(f"line {instruction.line}: address of a parameter: {instruction.text}")
        return Reg("%dynamic_shared") if binding.kind == "dynamic" else Imm(binding.address)

    def address(self, name: str, offset: int, names: ChainMap[str, _Binding], instruction: Instruction) -> Operand:
        binding = names.get(name)
        if binding is not None and binding.kind == "cell":
            return self.cells(binding, offset, instruction)
        if "param" in instruction.modifiers:
            raise UnknownInstruction(f"line {instruction.line}: computed parameter address: {instruction.text}")
        resolved = self.name(name, names, instruction)
        if isinstance(resolved, Imm):
            return Mem(None, int(resolved.value) + offset)
        assert isinstance(resolved, Reg)
        return Mem(resolved, offset)

    def cells(self, binding: _Binding, offset: int, instruction: Instruction) -> Operand:
        """The register, or the vector of registers, that stands for a parameter's bytes from `offset` on."""
        kind = instruction.modifiers[-1]
        width = {"v2": 2, "v4": 4}.get(instruction.modifiers[-2], 1)
        cells = []
        for index in range(width):
            position = offset + index * size_of(kind)
            name = f"{binding.name}@{position}"
            known = self.program.registers.setdefault(name, kind)
            if size_of(known) != size_of(kind):
                raise UnknownInstruction(f"line {instruction.line}: parameter read as .{kind}, written as .{known}")
            if binding.address >= 0:
                self.program.param_cells[name] = ParamCell(name, binding.address + position, known)
            cells.append(Reg(name))
        return cells[0] if width == 1 else Vec(tuple(cells))


def _names_used(module: Module) -> set[str]:
    """Variables that some body mentions: Numba declares environment pointers that nothing reads."""

    def walk(operand: Operand | None) -> Iterator[str]:
        match operand:
            case Reg(name):
                yield name
            case Mem(Reg(name), _):
                yield name
            case Vec(items):
                for item in items:
                    yield from walk(item)
            case Pair(first, second):
                yield from walk(first)
                yield from walk(second)

    def statements(body: list[Statement]) -> Iterator[Instruction]:
        for statement in body:
            if isinstance(statement, Scope):
                yield from statements(statement.body)
            elif isinstance(statement, Instruction):
                yield statement

    return {
        name
        for function in module.functions.values()
        for instruction in statements(function.body or [])
        for operand in instruction.operands
        for name in walk(operand)
    }
