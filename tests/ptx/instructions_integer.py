# mypy: disable-error-code="no-any-return"
"""Integer arithmetic: sums and products of all widths, carries, division, extrema, dot products of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .decode import Decoder, Registers, Step, handles
from .modifiers import Modifiers, unknown
from .parser import Instruction
from .scalars import Array, dtype_of, size_of

if TYPE_CHECKING:
    from .machine import Lanes

CARRY = "%carry"  # the condition code of add.cc and its kin
INTEGERS = {f"{sign}{bits}" for sign in "su" for bits in (16, 32, 64)}


def bits_of(kind: str) -> str:
    """The untyped kind of the same width: where signedness does not matter."""
    return f"b{8 * size_of(kind)}"


def wider(kind: str) -> str:
    return f"{kind[0]}{16 * size_of(kind)}"


def integer_kind(modifiers: Modifiers, allowed: set[str] = INTEGERS) -> str:
    kind = modifiers.type()
    if kind not in allowed:
        raise unknown(modifiers.instruction, f"type .{kind}")
    return kind


def carry_slot(d: Decoder) -> int:
    d.program.registers.setdefault(CARRY, "b64")
    if CARRY not in d.slots:
        d.slots[CARRY] = d.new_slot(CARRY, "b64")
    return d.slots[CARRY]


def with_carry(
    d: Decoder, i: Instruction, kinds: list[str], function: Callable[..., tuple[Array, Array]], out: bool
) -> Step:
    """Extended precision: `function(carry, a, b, ...)` gives the result and the carry (or borrow) out."""
    if i.guard is not None:
        raise unknown(i, "a guard on extended-precision arithmetic")
    values = [d.value(operand, kind, i) for operand, kind in zip(i.operands[1:], kinds, strict=True)]
    store = d.store(i.operands[0], kinds[0], i)
    carry = carry_slot(d)
    reads_carry = i.opcode in ("addc", "subc", "madc")
    if reads_carry:
        d.reads.append(carry)
    if out:
        d.writes.append(carry)

    def step(lanes: Lanes, R: Registers) -> None:
        previous = R[carry] if reads_carry else np.zeros(1, dtype=np.uint64)
        result, outgoing = function(previous, *[value(R) for value in values])
        store(R, result)
        if out:
            R[carry] = outgoing.astype(np.uint64)

    return step


def _sum_with_carry(carry: Array, a: Array, b: Array) -> tuple[Array, Array]:
    first = a + b
    second = first + carry.astype(first.dtype)
    return second, (first < a) | (second < first)


def _difference_with_borrow(borrow: Array, a: Array, b: Array) -> tuple[Array, Array]:
    first = a - b
    taken = borrow.astype(first.dtype)
    return first - taken, (a < b) | (first < taken)


def add_sub(d: Decoder, i: Instruction) -> Step:
    """Integer add and sub, with .sat, .cc and the carry forms. Floats are dispatched in instructions_float.py."""
    m = Modifiers(i)
    kind = integer_kind(m)
    extended = m.flag("cc")
    saturate = m.flag("sat")
    m.done()
    plain = i.opcode[:3]
    if extended or i.opcode.endswith("c"):
        function = _sum_with_carry if plain == "add" else _difference_with_borrow
        return with_carry(d, i, [f"u{8 * size_of(kind)}"] * 2, function, extended)
    if saturate:
        if kind != "s32":
            raise unknown(i, ".sat on this type")
        exact = np.add if plain == "add" else np.subtract
        return d.pure(i, lambda a, b: _clamp(exact(a.astype(np.int64), b), kind), kind, [kind] * 2)
    return d.pure(i, np.add if plain == "add" else np.subtract, bits_of(kind), [bits_of(kind)] * 2)


handles("addc", "subc")(add_sub)


def _clamp(wide: Array, kind: str) -> Array:
    limits = np.iinfo(dtype_of(kind))
    return np.clip(wide, limits.min, limits.max).astype(dtype_of(kind))


def high_half(kind: str) -> Callable[[Array, Array], Array]:
    """mul.hi: the upper half of the full product."""
    bits = 8 * size_of(kind)
    if bits < 64:
        wide = dtype_of(wider(kind))
        return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> bits).astype(dtype_of(kind))

    def unsigned_high(a: Array, b: Array) -> Array:
        low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
        middle = a1 * b0 + (a0 * b0 >> shift)
        return a1 * b1 + (middle >> shift) + ((a0 * b1 + (middle & low)) >> shift)

    if kind == "u64":
        return unsigned_high

    def signed_high(a: Array, b: Array) -> Array:
        high = unsigned_high(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
        return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)

    return signed_high


def multiply(d: Decoder, i: Instruction) -> Step:
    """Integer mul and mad: .lo, .hi, .wide, and mad's carry forms."""
    m = Modifiers(i)
    kind = integer_kind(m)
    part = m.one_of(("lo", "hi", "wide"))
    extended = m.flag("cc")
    m.done()
    if not part:
        raise unknown(i, "a product without .lo, .hi or .wide")
    adds = i.opcode != "mul"
    if extended or i.opcode == "madc":
        high = high_half(kind)
        product = np.multiply if part == "lo" else high
        return with_carry(
            d,
            i,
            [f"u{8 * size_of(kind)}"] * 3,
            lambda carry, a, b, c: _sum_with_carry(carry, product(a, b), c),
            extended,
        )
    if part == "wide":
        result, wide = wider(kind), dtype_of(wider(kind))
        if adds:
            return d.pure(i, lambda a, b, c: a.astype(wide) * b.astype(wide) + c, result, [kind, kind, result])
        return d.pure(i, lambda a, b: a.astype(wide) * b.astype(wide), result, [kind, kind])
    if part == "lo":
        same = bits_of(kind)
        if adds:
            return d.pure(i, lambda a, b, c: a * b + c, same, [same] * 3)
        return d.pure(i, np.multiply, same, [same] * 2)
    high = high_half(kind)
    if adds:
        return d.pure(i, lambda a, b, c: high(a, b) + c, kind, [kind] * 3)
    return d.pure(i, high, kind, [kind] * 2)


handles("madc")(multiply)


def quotient(a: Array, b: Array) -> Array:
    """Truncated division. By zero: all ones, as the hardware happens to give (PTX leaves it open)."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    result = (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, np.array(-1).astype(a.dtype), result)


def remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def divide(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m)
    m.done()
    return d.pure(i, quotient if i.opcode == "div" else remainder, kind, [kind] * 2)


handles("rem")(divide)


def sign_change(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"s16", "s32", "s64"})
    m.done()
    return d.pure(i, np.negative if i.opcode == "neg" else np.abs, kind, [kind])


def extremum(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m)
    m.done()
    return d.pure(i, np.minimum if i.opcode == "min" else np.maximum, kind, [kind] * 2)


@handles("sad")
def absolute_difference(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m)
    m.done()
    return d.pure(i, lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)), kind, [kind] * 3)


@handles("dp4a")
def dot_of_bytes(d: Decoder, i: Instruction) -> Step:
    """dp4a.atype.btype: c + sum of four byte products."""
    if len(i.modifiers) != 2 or not set(i.modifiers) <= {"u32", "s32"}:
        raise unknown(i, "these types")
    types = [np.int8 if kind == "s32" else np.uint8 for kind in i.modifiers]
    result = "s32" if "s32" in i.modifiers else "u32"

    def dot(a: Array, b: Array, c: Array) -> Array:
        a, b, c = np.broadcast_arrays(a, b, c)
        left, right = (
            np.ascontiguousarray(x).view(t).reshape(-1, 4).astype(np.int64) for x, t in zip((a, b), types, strict=True)
        )
        return (c.astype(np.int64) + (left * right).sum(axis=1)).astype(dtype_of(result))

    return d.pure(i, dot, result, ["b32", "b32", result])
