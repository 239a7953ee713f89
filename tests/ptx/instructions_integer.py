"""Integer arithmetic, bit operations, comparison, selection and moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import CLOCKS, Decoder, Modifiers, Registers, Step, handles, unknown
from .floats import compare, flush
from .parser import Instruction, Operand, Pair, Reg, Vec
from .scalars import UNSIGNED, Array, dtype_of, is_signed, size_of, unsigned

CARRY = "%carry"  # the condition code of add.cc and its kin
INTEGERS = {f"{sign}{bits}" for sign in "su" for bits in (16, 32, 64)}
BITS = {"pred", "b16", "b32", "b64"}


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

    def step(lanes: Any, R: Registers) -> None:
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


@handles("and", "or", "xor")
def logic(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, BITS)
    m.done()
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.opcode]
    return d.pure(i, function, kind, [kind] * 2)


@handles("not")
def invert(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, BITS)
    m.done()
    return d.pure(i, np.invert, kind, [kind])


@handles("cnot")
def logical_not(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, BITS - {"pred"})
    m.done()
    return d.pure(i, lambda a: (a == 0).astype(a.dtype), kind, [kind])


@handles("shl", "shr")
def shift(d: Decoder, i: Instruction) -> Step:
    """Amounts beyond the width clamp: zeros, or copies of the sign."""
    m = Modifiers(i)
    kind = integer_kind(m, INTEGERS | {"b16", "b32", "b64"})
    m.done()
    bits = 8 * size_of(kind)
    operation = np.left_shift if i.opcode == "shl" else np.right_shift
    kind = bits_of(kind) if i.opcode == "shl" or not is_signed(kind) else kind
    dtype = dtype_of(kind)
    amount = d.literal(i.operands[2])
    if amount is not None:
        count = amount & 0xFFFFFFFF
        if count >= bits and not is_signed(kind):
            return d.pure(i, np.zeros_like, kind, [kind], i.operands[1:2])
        constant = dtype.type(min(count, bits - 1))
        return d.pure(i, lambda a: operation(a, constant), kind, [kind], i.operands[1:2])

    def by_register(a: Array, count: Array) -> Array:
        clamped = np.minimum(count, np.uint32(bits - 1)).astype(dtype)
        shifted = operation(a, clamped)
        return shifted if is_signed(kind) else np.where(count >= bits, dtype.type(0), shifted)

    return d.pure(i, by_register, kind, [kind, "u32"])


@handles("shf")
def funnel_shift(d: Decoder, i: Instruction) -> Step:
    """shf.{l,r}.{clamp,wrap}.b32 d, a, b, c: 32 bits out of b:a (a is the lower word)."""
    m = Modifiers(i)
    kind = integer_kind(m, {"b32"})
    left, wrap = m.one_of(("l", "r")) == "l", m.one_of(("clamp", "wrap")) == "wrap"
    m.done()

    def funnel(a: Array, b: Array, c: Array) -> Array:
        count = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        if left:
            return ((both << count) >> np.uint64(32)).astype(np.uint32) if wrap else _left_clamped(both, count)
        return (both >> count).astype(np.uint32)

    return d.pure(i, funnel, kind, [kind] * 3)


def _left_clamped(both: Array, count: Array) -> Array:
    return ((both << count) >> np.uint64(32)).astype(np.uint32)


@handles("lop3")
def three_input_logic(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"b32"})
    m.done()
    table = d.literal(i.operands[4])
    if table is None:
        raise unknown(i, "a lookup table that is not constant")
    rows = [row for row in range(8) if table >> row & 1]

    def lookup(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(1, dtype=np.uint32)
        for row in rows:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            result = result | term
        return result

    return d.pure(i, lookup, kind, [kind] * 3, i.operands[1:4])


@handles("prmt")
def permute_bytes(d: Decoder, i: Instruction) -> Step:
    """Default mode: nibble n of the selector picks a byte of b:a for byte n; its top bit replicates the sign."""
    m = Modifiers(i)
    kind = integer_kind(m, {"b32"})
    m.done()
    pattern = d.literal(i.operands[3])
    if pattern is not None and not pattern & 0x8888:
        return d.pure(i, permute_by(pattern), kind, [kind] * 2, i.operands[1:3])

    def permute(a: Array, b: Array, selector: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros(1, dtype=np.uint64)
        for n in range(4):
            nibble = (selector >> np.uint32(4 * n)).astype(np.uint64) & np.uint64(15)
            byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result = result | (np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * n))
        return result.astype(np.uint32)

    return d.pure(i, permute, kind, [kind] * 3)


def permute_by(selector: int) -> Callable[[Array, Array], Array]:
    """A permutation known in advance: bytes that move by the same distance move together."""
    moves: dict[tuple[int, int], int] = {}  # (source word, bytes to the left) -> mask of the result
    for n in range(4):
        byte = selector >> 4 * n & 7
        key = byte // 4, n - byte % 4
        moves[key] = moves.get(key, 0) | 0xFF << 8 * n

    def permute(a: Array, b: Array) -> Array:
        result: Array | None = None
        for (word, left), mask in moves.items():
            part = (a, b)[word]
            if left:
                part = part << np.uint32(8 * left) if left > 0 else part >> np.uint32(-8 * left)
            part = part & np.uint32(mask)
            result = part if result is None else result | part
        assert result is not None
        return result

    return permute


@handles("popc")
def population_count(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"b32", "b64"})
    m.done()
    return d.pure(i, lambda a: np.bitwise_count(a).astype(np.uint32), "u32", [kind])


def highest_bit(a: Array, bits: int) -> Array:
    """Index of the most significant set bit of unsigned `a`; -1 where none is set."""
    rest, position = a.copy(), np.full(a.shape, -1, dtype=np.int64)
    step = bits // 2
    position = np.where(a != 0, 0, position)
    while step:
        shifted = rest >> rest.dtype.type(step)
        upper = shifted != 0
        rest = np.where(upper, shifted, rest)
        position = position + np.where(upper, step, 0)
        step //= 2
    return position


@handles("clz")
def leading_zeros(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"b32", "b64"})
    m.done()
    bits = 8 * size_of(kind)
    return d.pure(i, lambda a: (bits - 1 - highest_bit(a, bits)).astype(np.uint32), "u32", [kind])


@handles("bfind")
def find_leading_bit(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"u32", "u64", "s32", "s64"})
    shift_amount = m.flag("shiftamt")
    m.done()
    bits = 8 * size_of(kind)

    def find(a: Array) -> Array:
        if is_signed(kind):
            a = np.where(a < 0, ~a, a)
        found = highest_bit(a.view(unsigned(kind)), bits)
        return np.where(found < 0, found, bits - 1 - found if shift_amount else found).astype(np.int32).view(np.uint32)

    return d.pure(i, find, "u32", [kind])


@handles("brev")
def reverse_bits(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"b32", "b64"})
    m.done()
    dtype = dtype_of(kind)
    bits = 8 * dtype.itemsize

    def reverse(a: Array) -> Array:
        result, step = a, bits // 2
        while step:
            # Bits whose index has `step` clear, e.g. 0x55555555 for 1.
            low = dtype.type(sum(1 << n for n in range(bits) if not n & step))
            result = ((result >> dtype.type(step)) & low) | ((result & low) << dtype.type(step))
            step //= 2
        return result

    return d.pure(i, reverse, kind, [kind])


@handles("bfe")
def extract_field(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"u32", "u64", "s32", "s64"})
    m.done()
    bits, signed = 8 * size_of(kind), is_signed(kind)

    def extract(a: Array, position: Array, length: Array) -> Array:
        """Bit by bit as the manual has it: past the top, copies of the sign (or zeros)."""
        start = (position & np.uint32(255)).astype(np.int64)
        count = (length & np.uint32(255)).astype(np.int64)
        raw = a.view(unsigned(kind))
        top = np.minimum(start + count - 1, bits - 1)
        filler = (raw >> np.maximum(top, 0).astype(raw.dtype)) & raw.dtype.type(1)
        filler = np.where((count == 0) | (not signed), raw.dtype.type(0), filler)
        ones = ~raw.dtype.type(0)
        field = np.where(start >= bits, raw.dtype.type(0), raw >> np.minimum(start, bits - 1).astype(raw.dtype))
        available = np.clip(np.minimum(count, bits - start), 0, bits)
        keep = np.where(
            available >= bits,
            ones,
            (raw.dtype.type(1) << np.minimum(available, bits - 1).astype(raw.dtype)) - raw.dtype.type(1),
        )
        return np.where(filler != 0, (field & keep) | ~keep, field & keep).view(dtype_of(kind))

    return d.pure(i, extract, kind, [kind, "u32", "u32"])


@handles("bfi")
def insert_field(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = integer_kind(m, {"b32", "b64"})
    m.done()
    dtype, bits = dtype_of(kind), 8 * size_of(kind)

    def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
        start = (position & np.uint32(255)).astype(np.int64)
        count = np.clip(np.minimum((length & np.uint32(255)).astype(np.int64), bits - start), 0, bits)
        ones = ~dtype.type(0)
        low = np.where(
            count >= bits, ones, (dtype.type(1) << np.minimum(count, bits - 1).astype(dtype)) - dtype.type(1)
        )
        at = np.minimum(start, bits - 1).astype(dtype)
        mask = np.where(start >= bits, dtype.type(0), low << at)
        return (b & ~mask) | ((a << at) & mask)

    return d.pure(i, insert, kind, [kind, kind, "u32", "u32"])


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


# --- comparison and selection -----------------------------------------------------------------------------------

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

    def step(lanes: Any, R: Registers) -> None:
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


# --- moves --------------------------------------------------------------------------------------------------------


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

    def step(lanes: Any, R: Registers) -> None:
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
    from .errors import Trap
    from .memory import instruction_text

    mask = d.mask(i)
    name = i.operands[0].name if isinstance(i.operands[0], Reg) else "?"

    def step(lanes: Any, R: Registers) -> None:
        taking = mask(R)
        if taking is None or taking.any():
            raise Trap(f"{lanes.where(0)}: {instruction_text(i)}: the module does not define {name}")

    return step
