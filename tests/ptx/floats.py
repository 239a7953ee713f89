# mypy: disable-error-code="no-any-return"
"""Float semantics that NumPy does not have: fused multiply-add, directed rounding, flush to zero, narrow formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .scalars import Array

MIN_NORMAL = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """.ftz: float32 subnormals become zeros of their sign; other dtypes pass."""
    if x.dtype != np.float32:
        return x
    small = np.abs(x) < MIN_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def saturate(x: Array) -> Array:
    """.sat: clamp to [0, 1]; NaN becomes +0."""
    one = x.dtype.type(1)
    return np.where(x > 0, np.minimum(x, one), x.dtype.type(0))


def add_to_odd(x: Array, y: Array) -> Array:
    """x + y in float64, rounded to odd: rounding the result again to a narrower format is then rounding once.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008).
    """
    x, y = np.broadcast_arrays(x, y)
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)  # exact (Knuth's TwoSum)
    bits = total.view(np.int64)
    fix = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    if not fix.any():
        return total
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(fix, towards, 0)).view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c with one rounding, to nearest even.

    The product of two float32 is exact in float64. Rounding the float64 sum to float32 errs only where that sum is
    itself a rounded number that lies midway between two float32, or below float32's normal range: those are redone.
    """
    product = a.astype(np.float64) * b
    total = product + c
    halfway = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    halfway |= (np.abs(total) < 2.0**-126) & (total != 0)
    if halfway.any():
        total = np.where(halfway, add_to_odd(product, c.astype(np.float64)), total)
    return total.astype(np.float32)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """float64 a * b + c with one rounding (barring intermediate over- and underflow, where it falls back to two)."""
    high, low = two_product(a, b)
    upper, lower = two_sum(c, low)
    top, rest = two_sum(high, upper)
    result = top + add_to_odd(rest, lower)
    plain = a * b + c
    return np.where(np.isfinite(result), result, plain)


def two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b = high + low exactly (Dekker, with Veltkamp's splitting)."""
    high = a * b

    def split(x: Array) -> tuple[Array, Array]:
        scaled = 134217729.0 * x
        upper = scaled - (scaled - x)
        return upper, x - upper

    a1, a2 = split(a)
    b1, b2 = split(b)
    return high, ((a1 * b1 - high) + a1 * b2 + a2 * b1) + a2 * b2


def to_float32(x: Array, mode: str) -> Array:
    """Round float64 (exact, or rounded to odd) to float32: rn, rz, rm (down) or rp (up)."""
    near = x.astype(np.float32)
    if mode == "rn":
        return near
    wide = near.astype(np.float64)
    wrong = {"rz": np.abs(wide) > np.abs(x), "rm": wide > x, "rp": wide < x}[mode]
    goal = np.float32({"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode])
    return np.where(wrong, np.nextafter(near, goal), near)


def round_integral(x: Array, mode: str) -> Array:
    """rni, rzi, rmi, rpi, keeping the dtype."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


# --- formats narrower than float32, as bits ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Format:
    """Sign, exponent, mantissa. `largest` is the biggest finite value; `nan` the canonical NaN's bits."""

    name: str
    bits: int
    mantissa: int
    bias: int
    largest: float
    nan: int
    has_infinity: bool = True

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)


FORMATS = {
    "f16": Format("f16", 16, 10, 15, 65504.0, 0x7FFF),
    "bf16": Format("bf16", 16, 7, 127, float.fromhex("0x1.fep127"), 0x7FFF),
    "e4m3": Format("e4m3", 8, 3, 7, 448.0, 0x7F, has_infinity=False),
    "e5m2": Format("e5m2", 8, 2, 15, 57344.0, 0x7F),
}


def encode(x: Array, name: str, mode: str = "rn", finite: bool = False) -> Array:
    """Round float32 or float64 values once to `name`'s bits. `finite`: overflow and infinity give the largest value."""
    if mode == "rn" and not finite and x.dtype == np.float32:
        if name == "bf16":
            return _bf16_bits(x)
        if name == "f16":
            return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
    form = FORMATS[name]
    x = x.astype(np.float64)
    magnitude = np.abs(x)
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, -2000)
    exponent = np.maximum(exponent, 1 - form.bias).astype(np.int64)
    quantum = exponent - form.mantissa
    scaled = np.ldexp(magnitude, -quantum)
    up: dict[str, Callable[[Array], Array]] = {"rn": np.rint, "rz": np.floor, "rna": lambda v: np.floor(v + 0.5)}
    if mode not in up:
        directed = (x > 0) == (mode == "rp")
        units = np.where(directed, np.ceil(scaled), np.floor(scaled))
    else:
        units = up[mode](scaled)
    finite_units = np.where(np.isfinite(units), units, 0).astype(np.int64)
    bits = ((exponent + form.bias - 1) << form.mantissa) + finite_units
    largest = _largest_bits(form)
    overflow = np.ldexp(finite_units.astype(np.float64), quantum) > form.largest
    infinite = np.isinf(x)
    beyond = largest + 1 if form.has_infinity and not finite else (largest if finite else form.nan)
    over = np.where(infinite | (mode in ("rn", "rna")), beyond, largest)
    if mode in ("rm", "rp"):
        over = np.where(infinite | ((x > 0) == (mode == "rp")), beyond, largest)
    bits = np.where(overflow | infinite, over, bits)
    bits = bits | (np.signbit(x).astype(np.int64) << (form.bits - 1))
    return np.where(np.isnan(x), form.nan, bits).astype(form.dtype)


def _largest_bits(form: Format) -> int:
    fraction, exponent = np.frexp(form.largest)
    return int(((int(exponent) - 1 + form.bias - 1) << form.mantissa) + int(np.ldexp(fraction, form.mantissa + 1)))


def _bf16_bits(x: Array) -> Array:
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _table(form: Format) -> Array:
    """All values of an 8-bit format."""
    codes = np.arange(256)
    field, fraction = codes >> form.mantissa & ((1 << (7 - form.mantissa)) - 1), codes & ((1 << form.mantissa) - 1)
    units = np.where(field > 0, fraction + (1 << form.mantissa), fraction)
    values = np.ldexp(units.astype(np.float64), np.maximum(field, 1) - form.bias - form.mantissa)
    if form.has_infinity:
        top = field == (1 << (7 - form.mantissa)) - 1
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


_TABLES = {name: _table(FORMATS[name]) for name in ("e4m3", "e5m2")}


def decode(bits: Array, name: str) -> Array:
    """Bits of a narrow format to float32, exactly."""
    if name == "f16":
        return bits.view(np.float16).astype(np.float32)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _TABLES[name][bits]


# --- comparison -------------------------------------------------------------------------------------------------

_ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def compare(relation: str, kind: str) -> Callable[[Array, Array], Array]:
    """PTX's relation on values of `kind`; the u-forms are true where either is NaN, `ne` is false there."""
    floating = kind in ("f32", "f64", "f16", "bf16")
    if not floating:
        return _ORDERED[relation]
    if kind in ("f16", "bf16"):
        inner = compare(relation, "f32")
        return lambda a, b: inner(decode(a, kind), decode(b, kind))
    if relation == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if relation == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if relation == "ne":
        return lambda a, b: (a < b) | (a > b)
    if relation.endswith("u"):
        opposite = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}[relation]
        if opposite == "ne":
            return lambda a, b: ~((a < b) | (a > b))
        test = _ORDERED[opposite]
        return lambda a, b: ~test(a, b)
    return _ORDERED[relation]
