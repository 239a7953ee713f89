"""The interpreter's integer instructions against Python's integers, which have no width to get wrong."""

import itertools

import numpy as np
import pytest

from tests.ptx.errors import UnknownInstruction
from tests.ptx.snippet import evaluate

EDGES32 = [0, 1, 2, 3, 7, 31, 32, 33, 255, 0x7FFF, 0x8000, 0xFFFF, 0x12345678, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
EDGES64 = [0, 1, 5, 63, 64, 0xFFFFFFFF, 0x100000000, 0x123456789ABCDEF0, 2**63 - 1, 2**63, 2**64 - 1]


def pairs(edges, dtype):
    rows = np.array(list(itertools.product(edges, edges)), dtype=dtype)
    return rows[:, 0].copy(), rows[:, 1].copy()


def signed(value, bits):
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def check(code, arrays, function, bits=32, result_bits=None, interpret=int):
    """`function` on exact integers, cut to the result's width, equals what the snippet stores."""
    width = result_bits or bits
    (got,) = evaluate(code, arrays, [f"b{width}"])
    expected = [function(*(interpret(v) for v in row)) & ((1 << width) - 1) for row in zip(*arrays, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected, dtype=got.dtype))


def s32(value):
    return signed(value, 32)


def s64(value):
    return signed(value, 64)


TRUNCATED = {
    "div": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "rem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("mul.hi", lambda a, b: (a * b) >> 32),
        ("min", min),
        ("max", max),
    ],
)
def test_signed_and_unsigned_arithmetic_32(opcode, function):
    a, b = pairs(EDGES32, np.uint32)
    check(f"{opcode}.u32 o0, i0, i1;", [a, b], function)
    check(f"{opcode}.s32 o0, i0, i1;", [a, b], function, interpret=s32)


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("mul.hi", lambda a, b: (a * b) >> 64),
        ("max", max),
    ],
)
def test_signed_and_unsigned_arithmetic_64(opcode, function):
    a, b = pairs(EDGES64, np.uint64)
    check(f"{opcode}.u64 o0, i0, i1;", [a, b], function, 64)
    check(f"{opcode}.s64 o0, i0, i1;", [a, b], function, 64, interpret=s64)


@pytest.mark.parametrize("opcode", ["div", "rem"])
def test_division_truncates_towards_zero(opcode):
    a, b = pairs([e for e in EDGES32 if e], np.uint32)
    check(f"{opcode}.u32 o0, i0, i1;", [a, b], TRUNCATED[opcode])
    check(f"{opcode}.s32 o0, i0, i1;", [a, b], TRUNCATED[opcode], interpret=s32)
    a, b = pairs([e for e in EDGES64 if e], np.uint64)
    check(f"{opcode}.s64 o0, i0, i1;", [a, b], TRUNCATED[opcode], 64, interpret=s64)


def test_wide_products_and_multiply_add():
    a, b = pairs(EDGES32, np.uint32)
    check("mul.wide.u32 o0, i0, i1;", [a, b], lambda x, y: x * y, result_bits=64)
    check("mul.wide.s32 o0, i0, i1;", [a, b], lambda x, y: x * y, result_bits=64, interpret=s32)
    check("mad.lo.s32 o0, i0, i1, i0;", [a, b], lambda x, y: x * y + x)
    check("mad.hi.u32 o0, i0, i1, i0;", [a, b], lambda x, y: ((x * y) >> 32) + x)
    check("mad.wide.s32 o0, i0, i1, -7;", [a, b], lambda x, y: x * y - 7, result_bits=64, interpret=s32)
    check("add.sat.s32 o0, i0, i1;", [a, b], lambda x, y: max(-(2**31), min(2**31 - 1, x + y)), interpret=s32)
    check("sad.u32 o0, i0, i1, i0;", [a, b], lambda x, y: x + abs(x - y))


def test_carries_chain_through_128_bit_sums_and_products():
    a, b = pairs(EDGES64, np.uint64)
    add = """
        .reg .b32 r0, r1, r2, r3, al, ah, bl, bh;
        mov.b64 {al, ah}, i0; mov.b64 {bl, bh}, i1;
        add.cc.u32 r0, al, bl; addc.cc.u32 r1, ah, bh; addc.u32 r2, 0, 0;
        mov.b64 o0, {r0, r1}; cvt.u64.u32 o1, r2;
    """
    low, carry = evaluate(add, [a, b], ["b64", "b64"])
    for x, y, got, c in zip(a, b, low, carry, strict=True):
        assert int(got) + (int(c) << 64) == int(x) + int(y)
    product = """
        .reg .u32 r0, r1, r2, r3, alo, ahi, blo, bhi;
        mov.b64 {alo,ahi}, i0; mov.b64 {blo,bhi}, i1;
        mul.lo.u32 r0, alo, blo; mul.hi.u32 r1, alo, blo;
        mad.lo.cc.u32 r1, alo, bhi, r1; madc.hi.u32 r2, alo, bhi, 0;
        mad.lo.cc.u32 r1, ahi, blo, r1; madc.hi.cc.u32 r2, ahi, blo, r2; madc.hi.u32 r3, ahi, bhi, 0;
        mad.lo.cc.u32 r2, ahi, bhi, r2; addc.u32 r3, r3, 0;
        mov.b64 o0, {r0,r1}; mov.b64 o1, {r2,r3};
    """
    low, high = evaluate(product, [a, b], ["b64", "b64"])
    for x, y, lo, hi in zip(a, b, low, high, strict=True):
        assert int(lo) + (int(hi) << 64) == int(x) * int(y)
    subtract = """
        .reg .b32 r0, r1, r2, al, ah, bl, bh;
        mov.b64 {al, ah}, i0; mov.b64 {bl, bh}, i1;
        sub.cc.u32 r0, al, bl; subc.cc.u32 r1, ah, bh; subc.u32 r2, 0, 0;
        mov.b64 o0, {r0, r1}; cvt.s64.s32 o1, r2;
    """
    low, borrow = evaluate(subtract, [a, b], ["b64", "b64"])
    for x, y, got, c in zip(a, b, low, borrow, strict=True):
        assert int(got) == (int(x) - int(y)) % 2**64
        assert int(c) == (2**64 - 1 if x < y else 0)


def test_logic_and_lop3():
    a, b = pairs(EDGES32, np.uint32)
    check("and.b32 o0, i0, i1;", [a, b], lambda x, y: x & y)
    check("or.b32 o0, i0, i1;", [a, b], lambda x, y: x | y)
    check("xor.b32 o0, i0, 0x0F0F0F0F;", [a], lambda x: x ^ 0x0F0F0F0F)
    check("not.b32 o0, i0;", [a], lambda x: ~x)
    check("cnot.b32 o0, i0;", [a], lambda x: int(x == 0))
    c = a[::-1].copy()
    check("lop3.b32 o0, i0, i1, i2, 0x96;", [a, b, c], lambda x, y, z: x ^ y ^ z)
    check("lop3.b32 o0, i0, i1, i2, 0xE8;", [a, b, c], lambda x, y, z: (x & y) | (y & z) | (x & z))
    check("lop3.b32 o0, i0, i1, i2, 0xEA;", [a, b, c], lambda x, y, z: (x & y) | z)


def test_shifts_clamp_beyond_the_width():
    a, b = pairs(EDGES32, np.uint32)
    check("shl.b32 o0, i0, i1;", [a, b], lambda x, n: x << min(n, 40))
    check("shr.u32 o0, i0, i1;", [a, b], lambda x, n: x >> min(n, 40))
    (got,) = evaluate("shr.s32 o0, i0, i1;", [a, b], ["b32"])
    assert [int(v) for v in got] == [(s32(x) >> min(int(n), 40)) & 0xFFFFFFFF for x, n in zip(a, b, strict=True)]
    for n in (0, 5, 31, 32, 200):
        check(f"shl.b32 o0, i0, {n};", [a], lambda x, n=n: x << n)
        check(f"shr.u32 o0, i0, {n};", [a], lambda x, n=n: x >> n)
        check(f"shr.s32 o0, i0, {n};", [a], lambda x, n=n: x >> n, interpret=s32)
    check("shr.s64 o0, i0, 70;", [np.array(EDGES64, np.uint64)], lambda x: x >> 70, 64, interpret=s64)


def test_funnel_shifts():
    a, b = pairs(EDGES32, np.uint32)
    n = np.resize(np.array([0, 1, 8, 31, 32, 33, 64], np.uint32), len(a))
    both = lambda x, y: (y << 32) | x  # noqa: E731
    check("shf.l.clamp.b32 o0, i0, i1, i2;", [a, b, n], lambda x, y, c: (both(x, y) << min(c, 32)) >> 32)
    check("shf.l.wrap.b32 o0, i0, i1, i2;", [a, b, n], lambda x, y, c: (both(x, y) << (c % 32)) >> 32)
    check("shf.r.clamp.b32 o0, i0, i1, i2;", [a, b, n], lambda x, y, c: both(x, y) >> min(c, 32))
    check("shf.r.wrap.b32 o0, i0, i1, i2;", [a, b, n], lambda x, y, c: both(x, y) >> (c % 32))


def test_counting_and_reversing_bits():
    a, b = np.array(EDGES32, np.uint32), np.array(EDGES64, np.uint64)
    check("popc.b32 o0, i0;", [a], lambda x: x.bit_count())
    check("popc.b64 o0, i0;", [b], lambda x: x.bit_count(), 64, 32)
    check("clz.b32 o0, i0;", [a], lambda x: 32 - x.bit_length())
    check("clz.b64 o0, i0;", [b], lambda x: 64 - x.bit_length(), 64, 32)
    check("brev.b32 o0, i0;", [a], lambda x: int(f"{x:032b}"[::-1], 2))
    check("brev.b64 o0, i0;", [b], lambda x: int(f"{x:064b}"[::-1], 2), 64)
    check("bfind.u32 o0, i0;", [a], lambda x: x.bit_length() - 1)
    check("bfind.s32 o0, i0;", [a], lambda x: (x if x >= 0 else ~x).bit_length() - 1, interpret=s32)
    check("bfind.shiftamt.u32 o0, i0;", [a], lambda x: 32 - x.bit_length() if x else -1)


def manual_bfe(value, position, length, bits, is_signed):
    """The pseudo-code of the PTX manual."""
    sign = 0
    if is_signed and length:
        sign = value >> min(position + length - 1, bits - 1) & 1
    result = 0
    for n in range(bits):
        inside = n < length and position + n < bits
        result |= ((value >> (position + n) & 1) if inside else sign) << n
    return result


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = int(kind[1:])
    values = np.array(EDGES32 if bits == 32 else EDGES64, dtype=f"u{bits // 8}")
    rows = list(itertools.product(values, [0, 1, 5, 24, 31, 40, 63, 64, 200], [0, 1, 3, 8, 31, 32, 63, 64, 255]))
    value = np.array([r[0] for r in rows], values.dtype)
    position, length = (np.array([r[n] for r in rows], np.uint32) for n in (1, 2))
    check(
        f"bfe.{kind} o0, i0, i1, i2;",
        [value, position, length],
        lambda v, p, n: manual_bfe(v, p, n, bits, kind[0] == "s"),
        bits,
    )
    if kind[0] == "s":
        return

    def insert(v, p, n):
        mask = ((1 << n) - 1 << p) & ((1 << bits) - 1)
        return (0x5A5A5A5A5A5A5A5A & ~mask) | ((v << p) & mask)

    background = "mov.b64 bg, 0x5A5A5A5A5A5A5A5A;" if bits == 64 else "mov.b32 bg, 0x5A5A5A5A;"
    check(f".reg .b{bits} bg; {background} bfi.b{bits} o0, i0, bg, i1, i2;", [value, position, length], insert, bits)


def test_permute_and_dot_product_of_bytes():
    a, b = pairs(EDGES32, np.uint32)

    def prmt(x, y, selector):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        out = 0
        for n in range(4):
            nibble = selector >> 4 * n & 15
            byte = source[nibble & 7]
            out |= (255 if byte & 128 and nibble & 8 else 0 if nibble & 8 else byte) << 8 * n
        return out

    for selector in (0x3210, 0x7654, 0x5410, 0x7632, 0x0123, 0x8888, 0xF0C4, 0x6420):
        check(f"prmt.b32 o0, i0, i1, {selector};", [a, b], lambda x, y, s=selector: prmt(x, y, s))

    def dot(x, y, z, kinds):
        left, right = (
            [signed(v >> 8 * n, 8) if k == "s" else v >> 8 * n & 255 for n in range(4)]
            for v, k in zip((x, y), kinds, strict=True)
        )
        return z + sum(p * q for p, q in zip(left, right, strict=True))

    for kinds in ("ss", "uu", "su"):
        check(f"dp4a.{kinds[0]}32.{kinds[1]}32 o0, i0, i1, i0;", [a, b], lambda x, y, k=kinds: dot(x, y, x, k))


def test_comparisons_choose_and_combine():
    a, b = pairs(EDGES32, np.uint32)
    relations = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}
    for name, method in relations.items():
        code = f".reg .pred p; setp.{name}.s32 p, i0, i1; selp.b32 o0, 11, 22, p;"
        check(code, [a, b], lambda x, y, m=method: 11 if getattr(x, m)(y) else 22, interpret=s32)
    for name, method in {"lo": "__lt__", "hs": "__ge__"}.items():
        code = f".reg .pred p; setp.{name}.u32 p, i0, i1; selp.b32 o0, 11, 22, p;"
        check(code, [a, b], lambda x, y, m=method: 11 if getattr(x, m)(y) else 22)
    both = ".reg .pred p, q, r; setp.gt.u32 r, i0, 100; setp.lt.and.u32 p|q, i0, i1, r;"
    check(both + "selp.b32 o0, 1, 0, p;", [a, b], lambda x, y: int(x < y and x > 100))
    check(both + "selp.b32 o0, 1, 0, q;", [a, b], lambda x, y: int(x >= y and x > 100))
    check("set.lt.u32.s32 o0, i0, i1;", [a, b], lambda x, y: -int(x < y), interpret=s32)
    check("slct.b32.s32 o0, 5, 6, i0;", [a], lambda x: 5 if x >= 0 else 6, interpret=s32)
    negated = ".reg .pred p; setp.eq.u32 p, i0, i1; @!p add.u32 o0, i0, 1; @p mov.u32 o0, 77;"
    check(negated, [a, b], lambda x, y: 77 if x == y else x + 1)


def test_predicates_are_values_too():
    a, b = pairs(EDGES32, np.uint32)
    code = """.reg .pred p, q, r; setp.lt.u32 p, i0, 100; setp.lt.u32 q, i1, 100;
              {op} selp.u32 o0, 1, 0, r;"""
    for op, function in {
        "and.pred r, p, q;": lambda x, y: x < 100 and y < 100,
        "or.pred r, p, q;": lambda x, y: x < 100 or y < 100,
        "xor.pred r, p, q;": lambda x, y: (x < 100) != (y < 100),
        "not.pred r, p;": lambda x, y: x >= 100,
        "mov.pred r, q;": lambda x, y: y < 100,
        "mov.pred r, 0; or.pred r, r, p;": lambda x, y: x < 100,
    }.items():
        check(code.replace("{op}", op), [a, b], lambda x, y, f=function: int(f(x, y)))


def test_sixteen_bit_registers_wrap_and_widen():
    a = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint16)
    check("add.u16 o0, i0, 1;", [a], lambda x: x + 1, 16)
    check("mul.wide.s16 o0, i0, i0;", [a], lambda x: x * x, 16, 32, interpret=lambda v: signed(v, 16))
    check("shr.s16 o0, i0, 3;", [a], lambda x: signed(x, 16) >> 3, 16)
    check("cvt.s32.s16 o0, i0;", [a], lambda x: signed(x, 16), 16, 32)
    check("cvt.u32.u16 o0, i0;", [a], lambda x: x, 16, 32)


def test_integer_conversions_truncate_extend_and_saturate():
    a = np.array(EDGES32, np.uint32)
    check("cvt.u64.u32 o0, i0;", [a], lambda x: x, 32, 64)
    check("cvt.s64.s32 o0, i0;", [a], s32, 32, 64)
    check("cvt.u16.u32 o0, i0;", [a], lambda x: x, 32, 16)
    check("cvt.s32.s8 o0, i0;", [a], lambda x: signed(x, 8))
    check("cvt.u32.u8 o0, i0;", [a], lambda x: x & 255)
    check("cvt.sat.s8.s32 o0, i0;", [a], lambda x: max(-128, min(127, s32(x))))
    check("cvt.sat.u8.s32 o0, i0;", [a], lambda x: max(0, min(255, s32(x))))
    check("cvt.u32.u64 o0, i0;", [np.array(EDGES64, np.uint64)], lambda x: x, 64, 32)
    b = a[::-1].copy()
    clamp = lambda v: max(-128, min(127, s32(v))) & 255  # noqa: E731
    check("cvt.pack.sat.s8.s32.b32 o0, i0, i1, i0;", [a, b], lambda x, y: (x << 16) | (clamp(x) << 8) | clamp(y))


def test_vectors_pack_and_unpack():
    a = np.array(EDGES64, np.uint64)
    code = ".reg .b16 h<4>; .reg .b32 lo, hi; mov.b64 {h0, h1, h2, h3}, i0; mov.b64 {_, hi}, i0;"
    check(code + "mov.b64 o0, {h3, h2, h1, h0};", [a], lambda x: int.from_bytes(b"".join(
        x.to_bytes(8, "little")[2 * n : 2 * n + 2] for n in (3, 2, 1, 0)), "little"), 64)  # fmt: skip
    check(code + "mov.b32 o0, hi;", [a], lambda x: x >> 32, 64, 32)


@pytest.mark.parametrize(
    "code",
    [
        "frobnicate.u32 o0, i0;",
        "add.s32.approx o0, i0, i0;",
        "add.s8 o0, i0, i0;",
        "mul.u32 o0, i0, i0;",
        "shf.l.sideways.b32 o0, i0, i0, 1;",
        "lop3.b32 o0, i0, i0, i0;",
        "ld.global.v3.u32 {o0, o0, o0}, [a_i0];",
        "mov.u32 o0, %no_such_register;",
        "bar.arrive 0, 64; mov.u32 o0, i0;",
        "add.u32 o0, i0, i0, i0;",
        "vote.sync.any.pred o0, i0, -1, i0;",
    ],
)
def test_anything_unknown_is_refused_by_name(code):
    with pytest.raises(UnknownInstruction) as caught:
        evaluate(code, [np.arange(32, dtype=np.uint32)], ["b32"])
    assert code.split(" ")[0] in str(caught.value)
