"""Comparison, selection, moves between registers, and instructions that need do nothing here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .decode import CLOCKS, Decoder, Registers, Step, handles
from .errors import Trap
from .floats import compare, flush
from .instructions_integer import bits_of, integer_kind
from .memory import instruction_text
from .modifiers import Modifiers, unknown
from .parser import Instruction, Operand, Pair, Reg, Vec
from .scalars import UNSIGNED, Array, dtype_of, size_of

if TYPE_CHECKING:
    from .machine import Lanes

COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "lo",
    "ls",
    "hi",
    "hs",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
    "num",
    "nan",
)
COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


@handles("setp", "set")
def set_predicate(d: Decoder, i: Instruction) -> Step:
    """setp.cmp[.bool][.ftz].type p[|q], a, b[, c]; set.cmp[.bool].dtype.type d, a, b[, c]."""
    m = Modifiers(i)
    kind = m.type()
    result = m.type() if i.opcode == "set" else "pred"
    relation = m.one_of(COMPARISONS)
    combine = COMBINE.get(m.one_of(("and", "or", "xor")))
    ftz = m.flag("ftz")
    m.done()
    if not relation or kind == "pred" or kind.endswith("x2") or result not in ("pred", "u32", "s32", "f32"):
        raise unknown(i, "this comparison")
    a, b = (d.value(operand, kind, i) for operand in i.operands[1:3])
    if (combine is not None) != (len(i.operands) == 4):
        raise unknown(i, f"{len(i.operands)} operands")
    other = d.value(i.operands[3], "pred", i) if combine else None
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    store = d.store(first, result, i)
    store_second = d.store(second, "pred", i) if second is not None else None
    test = compare(relation, kind)

    def step(lanes: Lanes, R: Registers) -> None:
        x, y = a(R), b(R)
        outcome = test(flush(x), flush(y)) if ftz else test(x, y)
        if store_second is not None:
            opposite = ~outcome
            store_second(R, combine(opposite, other(R)) if combine and other else opposite)
        if combine and other:
            outcome = combine(outcome, other(R))
        store(R, outcome if result == "pred" else _as_number(outcome, result))

    return d.guarded(i, step)


def _as_number(outcome: Array, kind: str) -> Array:
    if kind == "f32":
        return outcome.astype(np.float32)
    return -(outcome.astype(np.int32)) if kind == "s32" else (-(outcome.astype(np.int32))).view(np.uint32)


@handles("selp")
def select(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = m.type()
    m.done()
    return d.pure(i, lambda a, b, p: np.where(p, a, b), kind, [kind, kind, "pred"])


@handles("slct")
def select_by_sign(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    condition = integer_kind(m, {"s32", "f32"})
    kind = m.type()
    ftz = m.flag("ftz")
    m.done()

    def choose(a: Array, b: Array, c: Array) -> Array:
        return np.where((flush(c) if ftz else c) >= 0, a, b)

    return d.pure(i, choose, kind, [kind, kind, condition])


@handles("mov")
def move(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = m.type()
    m.done()
    if len(i.operands) != 2:
        raise unknown(i, f"{len(i.operands)} operands")
    target, source = i.operands
    if isinstance(target, Vec):
        return unpack(d, i, target, source, kind)
    if isinstance(source, Vec):
        return pack(d, i, source, kind)
    if isinstance(source, Reg) and source.name in CLOCKS:
        store = d.store(target, CLOCKS[source.name], i)
        dtype = dtype_of(CLOCKS[source.name])
        return d.guarded(i, lambda lanes, R: store(R, np.array([lanes.machine.clock], dtype=np.uint64).astype(dtype)))
    # A move between registers of equal width reinterprets; the narrow special registers widen by zeros.
    if isinstance(source, Reg) and source.name.startswith("%") and kind == "u64" and _width(d, i, source) == 4:
        return d.pure(i, lambda a: a.astype(np.uint64), "u64", ["u32"])
    return d.pure(i, lambda a: a, kind, [kind])


def _width(d: Decoder, i: Instruction, register: Reg) -> int:
    return size_of(d.types[d.slot(register.name, i)])


def _pieces(vector: Vec, kind: str, i: Instruction) -> str:
    width = size_of(kind) // len(vector.items)
    if width not in UNSIGNED or width * len(vector.items) != size_of(kind):
        raise unknown(i, "a vector of this length")
    return f"b{8 * width}"


def unpack(d: Decoder, i: Instruction, target: Vec, source: Operand | None, kind: str) -> Step:
    piece = _pieces(target, kind, i)
    value = d.value(source, bits_of(kind), i)
    stores = [None if item is None else d.store(item, piece, i) for item in target.items]
    bits, dtype, whole = 8 * size_of(piece), dtype_of(piece), dtype_of(bits_of(kind))

    def step(lanes: Lanes, R: Registers) -> None:
        v = value(R)
        for n, store in enumerate(stores):
            if store is not None:
                store(R, (v >> whole.type(n * bits)).astype(dtype))

    return d.guarded(i, step)


def pack(d: Decoder, i: Instruction, source: Vec, kind: str) -> Step:
    piece = _pieces(source, kind, i)
    bits, whole = 8 * size_of(piece), dtype_of(bits_of(kind))

    def join(*values: Array) -> Array:
        result = values[0].astype(whole)
        for n, value in enumerate(values[1:], start=1):
            result = result | (value.astype(whole) << whole.type(n * bits))
        return result

    return d.pure(i, join, bits_of(kind), [piece] * len(source.items), source.items)


@handles("nanosleep", "membar", "fence", "prefetch", "prefetchu", "discard", "call")
def no_operation(d: Decoder, i: Instruction) -> Step:
    """Nothing to do in an interpreter that runs memory accesses in order; a call is expanded already, or undefined."""
    if i.opcode == "call" and i.modifiers != ("inlined",):
        return _undefined_call(d, i)
    return lambda lanes, R: None


def _undefined_call(d: Decoder, i: Instruction) -> Step:
    mask = d.mask(i)
    name = i.operands[0].name if isinstance(i.operands[0], Reg) else "?"

    def step(lanes: Lanes, R: Registers) -> None:
        taking = mask(R)
        if taking is None or taking.any():
            raise Trap(f"{lanes.where(0)}: {instruction_text(i)}: the module does not define {name}")

    return step
