"""PTX text to a tree: module, variables, functions, and statements with their operands. No meaning is attached here."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .errors import PtxSyntaxError
from .scalars import DTYPES, size_of


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, or any bare name until the flattening pass has resolved it (symbol, label, parameter)."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal: int, or float from 0f/0d/decimal notation."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset]; base None is an absolute address."""

    base: Reg | None
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}; an item None is the sink `_`."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p: a result and the predicate beside it."""

    first: Operand | None
    second: Operand | None


@dataclass(frozen=True, slots=True)
class Not:
    """!p."""

    name: str


@dataclass(frozen=True, slots=True)
class Names:
    """(a, b): parameter lists of a call."""

    names: tuple[str, ...]


Operand = Reg | Imm | Mem | Vec | Pair | Not | Names


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@guard opcode.modifiers operands`, where it stands, and what it said."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand | None, ...]
    line: int
    text: str
    guard: Reg | Not | None = None
    source_line: int = 0  # of the Python source, where the PTX has .loc; 0: unknown


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Branchtargets:
    name: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Declaration:
    """A variable in some state space; `count` elements of `type` (0: sized at launch)."""

    space: str
    name: str
    type: str
    count: int = 1
    align: int = 0
    initial: bytes | None = None
    is_array: bool = False

    @property
    def size(self) -> int:
        return self.count * size_of(self.type)

    @property
    def alignment(self) -> int:
        return self.align or size_of(self.type)


@dataclass(frozen=True, slots=True)
class Scope:
    """{ ... } inside a body: its registers hide outer ones."""

    body: list[Statement]


Statement = Instruction | Label | Branchtargets | Declaration | Scope


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    params: list[Declaration]
    results: list[Declaration]
    body: list[Statement] | None  # None: declared here, defined elsewhere
    max_threads: int = 0  # from .maxntid / .reqntid


@dataclass(slots=True)
class Module:
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Declaration] = field(default_factory=dict)

    def entry(self, name: str | None = None) -> Function:
        entries = [f for f in self.functions.values() if f.is_entry and f.body is not None]
        chosen = [f for f in entries if name is None or f.name == name]
        if len(chosen) != 1:
            raise PtxSyntaxError(f"the module has entries {[f.name for f in entries]}; name one")
        return chosen[0]


def parse(text: str) -> Module:
    """Parse a whole PTX module. Raises PtxSyntaxError with the line."""
    module = Module()
    tokens = _Statements(text)
    module.target = tokens.target
    for kind, chunk, line in tokens:
        if kind == "open":
            function = _function_header(chunk, line)
            function.body = _body(tokens)
            module.functions[function.name] = function
        elif kind == "statement" and re.search(r"\.func\b", chunk):
            function = _function_header(chunk, line)
            module.functions.setdefault(function.name, function)
        elif kind == "statement" and chunk.strip():
            for declaration in _declarations(chunk, line):
                module.variables[declaration.name] = declaration
        elif kind in ("label", "scope", "close"):
            raise PtxSyntaxError(f"line {line}: unexpected {kind} at module level: {chunk!r}")
    return module


class _Statements:
    """Splits the text at ';', braces and labels. Yields (kind, text, line): statement, label, open, scope, close."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
        lines = [line.split("//", 1)[0] for line in text.splitlines()]
        self.target = ""
        for number, line in enumerate(lines):
            stripped = line.lstrip()
            if stripped.startswith(".section"):  # debug data, always last
                del lines[number:]
                break
            if stripped.startswith(".target"):
                self.target = stripped.split()[1].rstrip(",")
            if stripped.startswith((".loc ", ".loc\t")):
                lines[number] = f".loc {stripped.split()[2]};"
            elif stripped.startswith((".version", ".target", ".address_size", ".file")):
                lines[number] = ""
        self.text = "\n".join(lines)
        self.position = 0
        self.line = 1

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        text = self.text
        start, line, depth = self.position, self.line, 0
        while self.position < len(text):
            char = text[self.position]
            self.position += 1
            if char == "\n":
                self.line += 1
                if not text[start : self.position].strip():
                    start, line = self.position, self.line
                continue
            if char not in ";{}:":
                continue
            chunk = text[start : self.position - 1]
            if depth:  # inside a vector operand or an initialiser
                depth += (char == "{") - (char == "}")
                continue
            if char == ":" and re.fullmatch(r"\s*[\w$%]+\s*", chunk) and text[self.position] != ":":
                yield "label", chunk.strip(), line
            elif char == ";":
                yield "statement", chunk.strip(), line
            elif char == "{" and not chunk.strip():
                yield "scope", "", line
            elif char == "{" and re.search(r"\.(entry|func)\b", chunk):
                yield "open", chunk.strip(), line
            elif char == "{":
                depth = 1
                continue
            elif char == "}":
                if chunk.strip():
                    raise PtxSyntaxError(f"line {line}: missing ';' after {chunk.strip()!r}")
                yield "close", "", line
            else:
                continue
            start, line = self.position, self.line


def _body(tokens: _Statements) -> list[Statement]:
    body: list[Statement] = []
    source_line = 0
    pending_targets: str | None = None
    for kind, chunk, line in tokens:
        if kind == "close":
            return body
        if kind == "scope":
            body.append(Scope(_body(tokens)))
        elif kind == "label":
            pending_targets = chunk
            body.append(Label(chunk))
        elif chunk.startswith(".loc "):
            source_line = int(chunk.split()[1])
        elif chunk.startswith(".branchtargets"):
            labels = tuple(name.strip() for name in chunk[len(".branchtargets") :].split(","))
            body[-1] = Branchtargets(pending_targets or "", labels)
        elif chunk.startswith(".pragma"):
            continue
        elif chunk.startswith("."):
            body.extend(_declarations(chunk, line))
        elif chunk:
            body.append(_instruction(chunk, line, source_line))
    raise PtxSyntaxError(f"line {tokens.line}: the text ends inside a body")


def _function_header(text: str, line: int) -> Function:
    match = re.search(
        r"\.(entry|func)\b\s*(\((?P<results>[^)]*)\))?\s*(?P<name>[\w$%]+)\s*(\((?P<params>[^)]*)\))?", text
    )
    if match is None:
        raise PtxSyntaxError(f"line {line}: not a function header: {text!r}")
    limit = re.search(r"\.(maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text[match.end() :])
    threads = 0
    if limit:
        threads = int(limit[2]) * int(limit[3] or 1) * int(limit[4] or 1)
    lists = [
        [d for part in (match[group] or "").split(",") if part.strip() for d in _declarations(part.strip(), line)]
        for group in ("params", "results")
    ]
    return Function(match["name"], match[1] == "entry", lists[0], lists[1], None, threads)


_IGNORED = {"visible", "extern", "common", "weak", "volatile", "ptr", "const", "noreturn"}
_SPACES = {"reg", "param", "local", "shared", "global", "const"}


def _declarations(text: str, line: int) -> Iterator[Declaration]:
    """`.shared .align 4 .b8 name[512]`, `.reg .f32 %f<21>`, `.reg .b32 a, b`, `.global .u32 x = 3`."""
    match = re.match(r"(?P<head>(?:\.[\w]+(?:\s+(?=\d)\d+)?\s*)+)(?P<names>.*)$", text, flags=re.S)
    if match is None:
        raise PtxSyntaxError(f"line {line}: not a declaration: {text!r}")
    space = kind = ""
    align = 0
    vector = 1
    for word, number in re.findall(r"\.(\w+)(?:\s+(\d+))?", match["head"]):
        if word in _SPACES and not space:
            space = word
        elif word == "align":
            align = int(number)
        elif word in DTYPES:
            kind = word
        elif word in ("v2", "v4"):
            vector = int(word[1])
        elif word not in _IGNORED and not (space == "param" and word in _SPACES):
            raise PtxSyntaxError(f"line {line}: unknown directive .{word} in {text!r}")
    if not space or not kind:
        raise PtxSyntaxError(f"line {line}: declaration without space or type: {text!r}")
    for part in re.split(r",(?![^{]*\})", match["names"]):
        yield from _declared(part.strip(), space, kind, align, vector, line)


def _declared(part: str, space: str, kind: str, align: int, vector: int, line: int) -> Iterator[Declaration]:
    family = re.fullmatch(r"([\w$%]+)<(\d+)>", part)
    if family:
        for index in range(int(family[2])):
            yield Declaration(space, f"{family[1]}{index}", kind)
        return
    match = re.fullmatch(r"([\w$%]+)\s*((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?", part, flags=re.S)
    if match is None:
        raise PtxSyntaxError(f"line {line}: cannot read the declaration {part!r}")
    count = vector
    for dimension in re.findall(r"\[\s*(\d*)\s*\]", match[2]):
        count *= int(dimension or 0)
    initial = None if match[3] is None else _initial(match[3], kind, count, line)
    yield Declaration(space, match[1], kind, count, align, initial, bool(match[2]))


def _initial(text: str, kind: str, count: int, line: int) -> bytes:
    values = [_literal(word.strip()) for word in text.replace("{", "").replace("}", "").split(",")]
    if any(value is None for value in values):
        raise PtxSyntaxError(f"line {line}: initialiser with a symbol is not supported: {text!r}")
    array = np.zeros(count, dtype=DTYPES[kind])
    mask = (1 << (8 * array.itemsize)) - 1
    if array.dtype.kind == "f":
        array[: len(values)] = np.array(values, dtype=np.float64)
    else:
        unsigned = array.view(f"u{array.itemsize}")
        unsigned[: len(values)] = [int(value) & mask for value in values if value is not None]
    return array.tobytes()


def _instruction(text: str, line: int, source_line: int) -> Instruction:
    match = re.match(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text, flags=re.S)
    if match is None:
        raise PtxSyntaxError(f"line {line}: not an instruction: {text!r}")
    guard: Reg | Not | None = None
    if match[2]:
        guard = Not(match[2]) if match[1] else Reg(match[2])
    opcode, *modifiers = match[3].split(".")  # `L2::128B` and `shared::cta` stay whole
    operands = tuple(_operand(part, line) for part in _split(match[4]))
    return Instruction(opcode, tuple(modifiers), operands, line, " ".join(text.split()), guard, source_line)


def _split(text: str) -> Iterator[str]:
    """Top-level commas only: {a, b} and (a, b) and [a] stay whole."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


def _operand(text: str, line: int) -> Operand | None:
    if text == "_":
        return None
    if text.startswith("{"):
        return Vec(tuple(_operand(part, line) for part in _split(text[1:-1])))
    if text.startswith("("):
        return Names(tuple(_split(text[1:-1])))
    if text.startswith("["):
        return _address(text[1:-1].strip(), line)
    if text.startswith("!"):
        return Not(text[1:].strip())
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first.strip(), line), _operand(second.strip(), line))
    literal = _literal(text)
    if literal is not None:
        return Imm(literal)
    if re.fullmatch(r"[\w$%]+(\.[xyzw])?", text):
        return Reg(text)
    raise PtxSyntaxError(f"line {line}: cannot read the operand {text!r}")


def _address(text: str, line: int) -> Mem:
    literal = _literal(text)
    if literal is not None:
        return Mem(None, int(literal))
    match = re.fullmatch(r"([\w$%]+)\s*(?:\+\s*(-?\s*\w+)|-\s*(\w+))?", text)
    if match is None:
        raise PtxSyntaxError(f"line {line}: cannot read the address [{text}]")
    offset = 0
    if match[2]:
        offset = int(match[2].replace(" ", ""), 0)
    elif match[3]:
        offset = -int(match[3], 0)
    return Mem(Reg(match[1]), offset)


def _literal(text: str) -> int | float | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return float(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return float(struct.unpack(">d", bytes.fromhex(text[2:]))[0])
    if re.fullmatch(r"[-+]?\d+\.\d*(e[-+]?\d+)?", text):
        return float(text)
    match = re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text)
    if match is None:
        return None
    digits = match[2]
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8) if octal else int(digits, 0)
    return -value if match[1] else value
