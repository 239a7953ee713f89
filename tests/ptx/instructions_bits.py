# mypy: disable-error-code="no-any-return"
"""Bits: logic, shifts, permutations, counting, fields."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Decoder, Step, handles
from .instructions_integer import INTEGERS, bits_of, integer_kind
from .modifiers import Modifiers, unknown
from .parser import Instruction
from .scalars import Array, dtype_of, is_signed, size_of, unsigned

BITS = {"pred", "b16", "b32", "b64"}


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
