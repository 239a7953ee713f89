"""Float semantics: rounding once, rounding modes, subnormals, NaN, saturation, narrow formats.

Exact references come from Python's fractions, so no other float arithmetic is trusted.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.errors import PtxError, UnknownInstruction
from tests.ptx.floats import FORMATS, decode, encode
from tests.ptx.snippet import evaluate

RNG = np.random.default_rng(5)
SPECIAL = [0.0, -0.0, 1.0, -1.5, 1e-38, 1e-40, -1e-45, 3.4e38, np.inf, -np.inf, np.nan, 0.1]


def special_pairs():
    rows = np.array(list(itertools.product(SPECIAL, SPECIAL)), dtype=np.float32)
    return rows[:, 0].copy(), rows[:, 1].copy()


def random_floats(count, low=-40, high=40, dtype=np.float32):
    return np.ldexp(RNG.uniform(-1, 1, count), RNG.integers(low, high, count)).astype(dtype)


def round_exact(value: Fraction, mantissa: int, emin: int, mode: str = "rn") -> Fraction:
    """Nearest (or directed) value with `mantissa` fraction bits and least exponent `emin`."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    exponent = max(exponent, emin)
    quantum = Fraction(2) ** (exponent - mantissa)
    units = value / quantum
    low = units.numerator // units.denominator
    if mode == "rn":
        rest = units - low
        low += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1)
    elif mode == "rp" or (mode == "rz" and value < 0):
        low += units != low
    return low * quantum


def same_bits(got, expected):
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}"))


def test_fma_of_float32_rounds_once():
    a, b = random_floats(4000), random_floats(4000)
    c = np.where(RNG.random(4000) < 0.5, -(a * b), random_floats(4000)).astype(np.float32)  # cancellation shows it
    (got,) = evaluate("fma.rn.f32 o0, i0, i1, i2;", [a, b, c], ["f32"])
    for x, y, z, g in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(g)) == round_exact(exact, 23, -126)


def test_fma_of_float32_where_rounding_twice_goes_wrong():
    # 1 + 2^-24 + 2^-60: float64 drops the last term, and the tie then rounds down to 1 instead of up.
    a = np.array([2.0**-30, 1 + 2.0**-12], np.float32)
    b = np.array([2.0**-30, 1 + 2.0**-12], np.float32)
    c = np.array([1 + 2.0**-23, 2.0**40], np.float32)
    halfway = np.float32(2.0**-24)
    (got,) = evaluate(
        ".reg .f32 s; fma.rn.f32 o0, i0, i1, i2;", [np.array([2.0**-30], np.float32)] * 2 + [halfway[None]], ["f32"]
    )
    assert got[0] == halfway  # far below half a unit
    x = np.array([1 + 2.0**-23], np.float32)
    y = np.array([2.0**-24 * (1 + 2.0**-23)], np.float32)
    (got,) = evaluate("fma.rn.f32 o0, i0, i1, i2;", [y, x, np.array([1.0], np.float32)], ["f32"])
    assert got[0] == np.float32(1 + 2.0**-23)
    (got,) = evaluate("fma.rn.f32 o0, i0, i1, i2;", [a, b, c], ["f32"])
    expected = [
        round_exact(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)), 23, -126)
        for p, q, r in zip(a, b, c, strict=True)
    ]
    assert [Fraction(float(g)) for g in got] == expected


def test_fma_of_float32_below_the_normal_range():
    a = random_floats(2000, -80, -60)
    b = random_floats(2000, -75, -60)
    c = random_floats(2000, -148, -126)
    (got,) = evaluate("fma.rn.f32 o0, i0, i1, i2;", [a, b, c], ["f32"])
    for x, y, z, g in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(g)) == round_exact(exact, 23, -126)


def test_fma_of_float64_rounds_once():
    a, b = random_floats(2000, dtype=np.float64), random_floats(2000, dtype=np.float64)
    c = np.where(RNG.random(2000) < 0.7, -(a * b), random_floats(2000, dtype=np.float64))
    (got,) = evaluate("fma.rn.f64 o0, i0, i1, i2;", [a, b, c], ["f64"])
    for x, y, z, g in zip(a, b, c, got, strict=True):
        assert Fraction(float(g)) == round_exact(Fraction(x) * Fraction(y) + Fraction(z), 52, -1022)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("opcode", ["add", "mul", "fma"])
def test_directed_rounding(opcode, mode):
    a, b, c = (random_floats(800) for _ in range(3))
    exact = {
        "add": lambda x, y, z: x + y,
        "mul": lambda x, y, z: x * y,
        "fma": lambda x, y, z: x * y + z,
    }[opcode]
    operands = "i0, i1, i2" if opcode == "fma" else "i0, i1"
    (got,) = evaluate(f"{opcode}.{mode}.f32 o0, {operands};", [a, b, c], ["f32"])
    for x, y, z, g in zip(a, b, c, got, strict=True):
        value = exact(*(Fraction(float(v)) for v in (x, y, z)))
        assert Fraction(float(g)) == round_exact(value, 23, -126, mode)


def test_plain_arithmetic_is_ieee():
    a, b = special_pairs()
    with np.errstate(all="ignore"):
        for opcode, ufunc in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide}.items():
            (got,) = evaluate(f"{opcode}.f32 o0, i0, i1;", [a, b], ["f32"])
            np.testing.assert_array_equal(got, ufunc(a, b))


def test_flush_to_zero_acts_on_inputs_and_results_and_keeps_the_sign():
    tiny = np.array([1e-40, -1e-40, 1e-45, 2.0**-126], np.float32)
    (kept,) = evaluate("mul.f32 o0, i0, 0f3F800000;", [tiny], ["f32"])
    same_bits(kept, tiny)
    (flushed,) = evaluate("mul.ftz.f32 o0, i0, 0f3F800000;", [tiny], ["f32"])
    same_bits(flushed, np.array([0.0, -0.0, 0.0, 2.0**-126], np.float32))
    (small,) = evaluate("mul.ftz.f32 o0, i0, 0f3F000000;", [tiny[3:]], ["f32"])
    assert small[0] == 0  # 2^-127 is a result too small
    (compared,) = evaluate(".reg .pred p; setp.eq.ftz.f32 p, i0, 0f00000000; selp.u32 o0, 1, 0, p;", [tiny], ["b32"])
    assert compared.tolist() == [1, 1, 1, 0]


def test_saturation_and_nan():
    a = np.array([-1.0, -0.0, 0.25, 1.0, 7.0, np.inf, -np.inf, np.nan], np.float32)
    (got,) = evaluate("add.sat.f32 o0, i0, 0f00000000;", [a], ["f32"])
    np.testing.assert_array_equal(got, [0, 0, 0.25, 1, 1, 1, 0, 0])


def test_minimum_and_maximum_drop_nan_and_order_zeros():
    a = np.array([1.0, np.nan, np.nan, -0.0, 0.0, 3.0], np.float32)
    b = np.array([np.nan, 2.0, np.nan, 0.0, -0.0, -3.0], np.float32)
    low, high, nan_low = evaluate(
        "min.f32 o0, i0, i1; max.f32 o1, i0, i1; min.NaN.f32 o2, i0, i1;", [a, b], ["f32"] * 3
    )
    np.testing.assert_array_equal(low, [1, 2, np.nan, -0.0, -0.0, -3])
    assert np.signbit(low[3:5]).all()
    assert not np.signbit(high[3:5]).any()
    np.testing.assert_array_equal(high, [1, 2, np.nan, 0, 0, 3])
    assert np.isnan(nan_low[:3]).all()


def test_ordered_and_unordered_comparisons():
    a, b = special_pairs()
    ordered = {"eq": a == b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    nan = np.isnan(a) | np.isnan(b)
    expected = dict(ordered)
    expected["ne"] = (a != b) & ~nan
    expected |= {f"{name}u": value | nan for name, value in expected.items()}
    expected |= {"num": ~nan, "nan": nan}
    for relation, truth in expected.items():
        code = f".reg .pred p; setp.{relation}.f32 p, i0, i1; selp.u32 o0, 1, 0, p;"
        (got,) = evaluate(code, [a, b], ["b32"])
        np.testing.assert_array_equal(got != 0, truth, relation)


def test_functions_are_within_a_unit_of_the_truth():
    x = np.concatenate([RNG.uniform(0.01, 20, 500), np.ldexp(1.0, np.arange(-20, 7))]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        truth_of_ex2 = np.exp2(wide).astype(np.float32)
    truth = {
        "rcp.approx.ftz": 1 / wide,
        "rcp.rn": 1 / wide,
        "sqrt.rn": np.sqrt(wide),
        "sqrt.approx": np.sqrt(wide),
        "rsqrt.approx.ftz": 1 / np.sqrt(wide),
        "ex2.approx": truth_of_ex2,
        "lg2.approx.ftz": np.log2(wide),
        "sin.approx": np.sin(wide),
        "cos.approx": np.cos(wide),
        "tanh.approx": np.tanh(wide),
    }
    for name, expected in truth.items():
        (got,) = evaluate(f"{name}.f32 o0, i0;", [x], ["f32"])
        same_bits(got, expected.astype(np.float32))
    (got,) = evaluate("rsqrt.approx.f64 o0, i0;", [wide], ["f64"])
    np.testing.assert_allclose(got, 1 / np.sqrt(wide), rtol=1e-15)
    (special,) = evaluate("ex2.approx.f32 o0, i0;", [np.array([-np.inf, np.inf, -200, np.nan, 0], np.float32)], ["f32"])
    np.testing.assert_array_equal(special, [0, np.inf, 0, np.nan, 1])


def test_signs_and_properties():
    a, b = special_pairs()
    (got,) = evaluate("copysign.f32 o0, i0, i1;", [a, b], ["f32"])
    same_bits(got, np.copysign(b, a))
    negated, absolute = evaluate("neg.f32 o0, i0; abs.f32 o1, i0;", [a], ["f32"] * 2)
    np.testing.assert_array_equal(negated, -a)
    np.testing.assert_array_equal(absolute, np.abs(a))
    for name, truth in {
        "finite": np.isfinite(a),
        "infinite": np.isinf(a),
        "notanumber": np.isnan(a),
        "subnormal": (a != 0) & (np.abs(a) < 2.0**-126),
    }.items():
        (got,) = evaluate(f".reg .pred p; testp.{name}.f32 p, i0; selp.u32 o0, 1, 0, p;", [a], ["b32"])
        np.testing.assert_array_equal(got != 0, truth)


# --- narrow formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "f16", "bf16"])
def test_every_code_of_a_format_survives_a_round_trip(name):
    form = FORMATS[name]
    codes = np.arange(1 << form.bits).astype(form.dtype)
    values = decode(codes, name)
    back = encode(values, name)
    proper = ~np.isnan(values)
    np.testing.assert_array_equal(back[proper], codes[proper])
    assert (back[~proper] == form.nan).all()


def test_formats_hold_the_values_of_their_definition():
    assert decode(np.array([0x7E], np.uint8), "e4m3")[0] == 448
    assert decode(np.array([0x01], np.uint8), "e4m3")[0] == 2.0**-9
    assert np.isnan(decode(np.array([0x7F, 0xFF], np.uint8), "e4m3")).all()
    assert decode(np.array([0x7B], np.uint8), "e5m2")[0] == 57344
    assert np.isinf(decode(np.array([0x7C], np.uint8), "e5m2")[0])
    assert decode(np.array([0x3F80], np.uint16), "bf16")[0] == 1
    assert decode(np.array([0x3C01], np.uint16), "f16")[0] == 1 + 2.0**-10


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_narrowing_rounds_once_and_exactly(name, mode):
    form = FORMATS[name]
    limit = {"e4m3": 8, "e5m2": 15, "f16": 15, "bf16": 60}[name]
    values = random_floats(1500, -limit - 12, limit)
    ties = decode(np.arange(1, 100, dtype=form.dtype), name)
    values = np.concatenate([values, (ties[1:] + ties[:-1]) / 2]).astype(np.float32)
    got = decode(encode(values, name, mode), name)
    for x, g in zip(values, got, strict=True):
        exact = round_exact(Fraction(float(x)), form.mantissa, 1 - form.bias, mode)
        if abs(exact) <= Fraction(form.largest):
            assert Fraction(float(g)) == exact


@np.errstate(over="ignore")
def test_overflow_of_narrow_formats():
    big = np.array([1e30, -1e30, np.inf, np.nan], np.float32)
    assert encode(big, "e4m3", finite=True).tolist() == [0x7E, 0xFE, 0x7E, 0x7F]
    assert encode(big, "e5m2", finite=True).tolist() == [0x7B, 0xFB, 0x7B, 0x7F]
    assert encode(big, "f16").tolist() == [0x7C00, 0xFC00, 0x7C00, 0x7FFF]
    assert encode(big, "f16", "rz").tolist() == [0x7BFF, 0xFBFF, 0x7C00, 0x7FFF]
    top = np.array([464.0, 463.9, 480.0], np.float32)  # 464 is half way to the next, which does not exist
    assert encode(top, "e4m3", finite=True).tolist() == [0x7E, 0x7E, 0x7E]


def test_conversions_between_float32_and_16_bit_formats():
    x = np.concatenate([random_floats(500, -20, 15), np.array(SPECIAL, np.float32)])
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    got, back = evaluate(".reg .b16 h; cvt.rn.f16.f32 h, i0; mov.b16 o0, h; cvt.f32.f16 o1, h;", [x], ["b16", "f32"])
    np.testing.assert_array_equal(got.view(np.float16), half)
    np.testing.assert_array_equal(back, half.astype(np.float32))
    (bf,) = evaluate("cvt.rn.bf16.f32 o0, i0;", [x], ["b16"])
    for v, g in zip(decode(bf, "bf16"), x, strict=True):
        if np.isfinite(g) and abs(g) < 3e38:
            assert Fraction(float(v)) == round_exact(Fraction(float(g)), 7, -126)
    low, high = x, x[::-1].copy()
    (pair,) = evaluate("cvt.rn.bf16x2.f32 o0, i0, i1;", [high, low], ["b32"])
    np.testing.assert_array_equal(pair & 0xFFFF, encode(low, "bf16"))
    np.testing.assert_array_equal(pair >> 16, encode(high, "bf16"))
    (relu,) = evaluate("cvt.rn.relu.f16x2.f32 o0, i0, i1;", [np.float32([-2, 3]), np.float32([5, -0.5])], ["b32"])
    assert relu.tolist() == [0x4500, 0x42000000]


def test_fp8_conversions_in_pairs():
    high, low = random_floats(400, -12, 10), random_floats(400, -12, 10)
    (packed,) = evaluate("cvt.rn.satfinite.e4m3x2.f32 o0, i0, i1;", [high, low], ["b16"])
    np.testing.assert_array_equal(packed & 255, encode(low, "e4m3", finite=True))
    np.testing.assert_array_equal(packed >> 8, encode(high, "e4m3", finite=True))
    codes = np.arange(65536).astype(np.uint16)
    codes = codes[(codes & 0x7F != 0x7F) & (codes >> 8 & 0x7F != 0x7F)]
    (halves,) = evaluate("cvt.rn.f16x2.e4m3x2 o0, i0;", [codes], ["b32"])
    np.testing.assert_array_equal(
        decode((halves & 0xFFFF).astype(np.uint16), "f16"), decode((codes & 255).astype(np.uint8), "e4m3")
    )
    np.testing.assert_array_equal(
        decode((halves >> 16).astype(np.uint16), "f16"), decode((codes >> 8).astype(np.uint8), "e4m3")
    )
    (again,) = evaluate("cvt.rn.satfinite.e4m3x2.f16x2 o0, i0;", [halves], ["b16"])
    np.testing.assert_array_equal(again, codes)
    with pytest.raises(UnknownInstruction):
        evaluate("cvt.rn.e4m3x2.f32 o0, i0, i1;", [high, low], ["b16"])


def test_arithmetic_on_halves_and_pairs():
    a = (
        encode(random_floats(300, -4, 4), "bf16").astype(np.uint32)
        | encode(random_floats(300, -4, 4), "bf16").astype(np.uint32) << 16
    )
    b, c = a[::-1].copy(), np.roll(a, 7)
    for kind in ("bf16", "f16"):
        parts = [
            [decode((v >> s & 0xFFFF).astype(np.uint16), kind).astype(np.float64) for s in (0, 16)] for v in (a, b, c)
        ]
        for code, function in {
            f"add.{kind}x2 o0, i0, i1;": lambda x, y, z: x + y,
            f"mul.{kind}x2 o0, i0, i1;": lambda x, y, z: x * y,
            f"fma.rn.{kind}x2 o0, i0, i1, i2;": lambda x, y, z: x * y + z,
            f"max.{kind}x2 o0, i0, i1;": lambda x, y, z: np.fmax(x, y),
        }.items():
            (got,) = evaluate(code, [a, b, c], ["b32"])
            for n in (0, 1):
                exact = function(*(p[n] for p in parts))
                np.testing.assert_array_equal((got >> 16 * n & 0xFFFF).astype(np.uint16), encode(exact, kind))
    (got,) = evaluate("neg.bf16x2 o0, i0;", [a], ["b32"])
    np.testing.assert_array_equal(got, a ^ 0x80008000)


def test_float_to_integer_rounds_clamps_and_zeroes_nan():
    x = np.array([0.5, 1.5, -0.5, -1.5, 2.5, 2.7, -2.7, 3e9, -3e9, 1e20, np.inf, -np.inf, np.nan], np.float32)
    clamp = lambda v: np.clip(np.nan_to_num(v, nan=0.0), -(2.0**31), 2.0**31 - 1).astype(np.int64)  # noqa: E731
    for mode, function in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        (got,) = evaluate(f"cvt.{mode}.s32.f32 o0, i0;", [x], ["s32"])
        np.testing.assert_array_equal(got, clamp(function(x.astype(np.float64))))
        (kept,) = evaluate(f"cvt.{mode}.f32.f32 o0, i0;", [x], ["f32"])
        np.testing.assert_array_equal(kept, function(x))
    (got,) = evaluate("cvt.rzi.u32.f32 o0, i0;", [x], ["b32"])
    assert got.tolist() == [0, 1, 0, 0, 2, 2, 0, 3000000000, 0, 2**32 - 1, 2**32 - 1, 0, 0]
    (got,) = evaluate("cvt.rzi.s64.f32 o0, i0;", [x], ["s64"])
    assert got.tolist()[7:] == [3000000000, -3000000000, 2**63 - 1, 2**63 - 1, -(2**63), 0]


def test_integer_to_float_and_between_widths():
    x = np.array([0, 1, 2**24 + 1, 2**31 - 1, -(2**31), -7], np.int32).view(np.uint32)
    (got,) = evaluate("cvt.rn.f32.s32 o0, i0;", [x], ["f32"])
    np.testing.assert_array_equal(got, x.view(np.int32).astype(np.float32))
    (down,) = evaluate("cvt.rz.f32.u32 o0, i0;", [x], ["f32"])
    for v, g in zip(x, down, strict=True):
        assert Fraction(float(g)) == round_exact(Fraction(int(v)), 23, -126, "rz")
    wide = random_floats(500, -30, 30, np.float64)
    for mode in ("rn", "rz", "rm", "rp"):
        (got,) = evaluate(f"cvt.{mode}.f32.f64 o0, i0;", [wide], ["f32"])
        for v, g in zip(wide, got, strict=True):
            assert Fraction(float(g)) == round_exact(Fraction(v), 23, -126, mode)
    (sat,) = evaluate("cvt.rn.sat.f32.f64 o0, i0;", [np.array([-1.0, 0.5, 2.0])], ["f32"])
    assert sat.tolist() == [0, 0.5, 1]


def test_tf32_keeps_ten_bits():
    x = random_floats(500)
    (got,) = evaluate("cvt.rna.tf32.f32 o0, i0;", [x], ["b32"])
    assert (got & 0x1FFF == 0).all()
    np.testing.assert_allclose(got.view(np.float32), x, rtol=2.0**-11)


def test_literals_must_have_the_operand_kind():
    with pytest.raises(PtxError):
        evaluate("add.f32 o0, i0, 1;", [np.zeros(1, np.float32)], ["f32"])
