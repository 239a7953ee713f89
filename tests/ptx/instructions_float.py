# mypy: disable-error-code="no-any-return"
"""Floating-point arithmetic, f32 and f64, and the 16-bit formats alone or in pairs; dispatch of opcodes that have
integer forms too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import instructions_integer as integer
from .decode import Decoder, Step, handles
from .floats import add_to_odd, decode, encode, flush, fma32, fma64, saturate, to_float32
from .modifiers import Modifiers, unknown
from .parser import Instruction
from .scalars import Array

Function = Callable[..., Array]
SMALL = {"f16": "f16", "bf16": "bf16", "f16x2": "f16", "bf16x2": "bf16"}
FLOATING = {"f32", "f64", *SMALL}
ROUNDING = ("rn", "rz", "rm", "rp")


def is_floating(i: Instruction) -> bool:
    return bool(i.modifiers) and i.modifiers[-1] in FLOATING


def arithmetic(
    d: Decoder,
    i: Instruction,
    kind: str,
    function: Function,
    operands: int,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Step:
    """`function` works on float32 (or float64) values; 16-bit formats are widened before and rounded after."""
    inner = _decorated(function, ftz, sat, relu)
    if kind in SMALL:
        form = SMALL[kind]

        def half(*bits: Array) -> Array:
            return encode(inner(*[decode(b, form) for b in bits]), form)

        if kind.endswith("x2"):
            return d.pure(i, lambda *args: by_halves(half, *args), kind, [kind] * operands)
        return d.pure(i, half, kind, [kind] * operands)
    return d.pure(i, inner, kind, [kind] * operands)


def _decorated(function: Function, ftz: bool, sat: bool, relu: bool) -> Function:
    if not (ftz or sat or relu):
        return function

    def decorated(*args: Array) -> Array:
        result = function(*[flush(a) for a in args]) if ftz else function(*args)
        if ftz:
            result = flush(result)
        if sat:
            result = saturate(result)
        if relu:
            result = np.where(result > 0, result, np.where(np.isnan(result), result, result.dtype.type(0)))
        return result

    return decorated


def by_halves(function: Function, *args: Array) -> Array:
    """Apply a 16-bit function to the lower and the upper halves of 32-bit words."""
    low = function(*[(a & np.uint32(0xFFFF)).astype(np.uint16) for a in args])
    high = function(*[(a >> np.uint32(16)).astype(np.uint16) for a in args])
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def directed(i: Instruction, kind: str, mode: str, near: Function, exact: Function) -> Function:
    """Round to nearest with `near`; other modes round the float64 result of `exact` (rounded to odd) to float32."""
    if mode in ("", "rn"):
        return near
    if kind != "f32":
        raise unknown(i, f".{mode} for .{kind}")
    return lambda *args: to_float32(exact(*[a.astype(np.float64) for a in args]), mode)


def common(i: Instruction) -> tuple[Modifiers, str, str, bool, bool]:
    m = Modifiers(i)
    kind = m.type()
    if kind not in FLOATING:
        raise unknown(i, f"type .{kind}")
    return m, kind, m.one_of(ROUNDING), m.flag("ftz"), m.flag("sat")


NEAREST: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
EXACT: dict[str, Function] = {"add": add_to_odd, "sub": lambda a, b: add_to_odd(a, -b), "mul": np.multiply}  # float64


@handles("add", "sub", "mul")
def add_sub_mul(d: Decoder, i: Instruction) -> Step:
    if not is_floating(i):
        return integer.multiply(d, i) if i.opcode == "mul" else integer.add_sub(d, i)
    m, kind, mode, ftz, sat = common(i)
    m.done()
    return arithmetic(d, i, kind, directed(i, kind, mode, NEAREST[i.opcode], EXACT[i.opcode]), 2, ftz, sat)


@handles("fma", "mad")
def fused(d: Decoder, i: Instruction) -> Step:
    """fma, and mad on floats, which is the same on every GPU since sm_20."""
    if i.opcode == "mad" and not is_floating(i):
        return integer.multiply(d, i)
    m, kind, mode, ftz, sat = common(i)
    relu = m.flag("relu")
    m.done()
    if not mode:
        raise unknown(i, "a product-sum without rounding mode")
    if kind in SMALL:  # product and sum to odd in float64, rounded once by encode
        return arithmetic(
            d, i, kind, lambda a, b, c: add_to_odd(a.astype(np.float64) * b, c.astype(np.float64)), 3, ftz, sat, relu
        )
    near = fma64 if kind == "f64" else fma32
    return arithmetic(
        d, i, kind, directed(i, kind, mode, near, lambda a, b, c: add_to_odd(a * b, c)), 3, ftz, sat, relu
    )


@handles("div")
def divide(d: Decoder, i: Instruction) -> Step:
    if not is_floating(i):
        return integer.divide(d, i)
    m, kind, mode, ftz, sat = common(i)
    approximate = m.one_of(("approx", "full"))
    m.done()
    if kind in SMALL or mode not in ("", "rn") or not (mode or approximate):
        raise unknown(i, "this division")
    return arithmetic(d, i, kind, np.divide, 2, ftz, sat)


@handles("neg", "abs")
def sign_change(d: Decoder, i: Instruction) -> Step:
    if not is_floating(i):
        return integer.sign_change(d, i)
    m, kind, mode, ftz, sat = common(i)
    m.done()
    if mode or sat:
        raise unknown(i, "these modifiers")
    if kind in SMALL:
        bits = np.uint32(0x80008000) if kind.endswith("x2") else np.uint16(0x8000)
        change = (lambda a: a ^ bits) if i.opcode == "neg" else (lambda a: a & ~bits)
        return d.pure(i, change, kind, [kind])
    return arithmetic(d, i, kind, np.negative if i.opcode == "neg" else np.abs, 1, ftz)


@handles("min", "max")
def extremum(d: Decoder, i: Instruction) -> Step:
    """A NaN operand loses (with .NaN it wins); -0 is less than +0."""
    if not is_floating(i):
        return integer.extremum(d, i)
    m, kind, mode, ftz, sat = common(i)
    propagate = m.flag("NaN")
    m.done()
    if mode or sat:
        raise unknown(i, "these modifiers")
    smaller = i.opcode == "min"
    choose: Any = {
        (True, True): np.minimum,
        (True, False): np.fmin,
        (False, True): np.maximum,
        (False, False): np.fmax,
    }[smaller, propagate]

    def extreme(*values: Array) -> Array:
        result = values[0]
        for value in values[1:]:
            chosen = choose(result, value)
            zeros = (result == 0) & (value == 0)
            if zeros.any():
                sign = np.signbit(result) | np.signbit(value) if smaller else np.signbit(result) & np.signbit(value)
                chosen = np.where(zeros, np.copysign(chosen.dtype.type(0), np.where(sign, -1, 1)), chosen)
            result = chosen.astype(value.dtype)
        return result

    return arithmetic(d, i, kind, extreme, len(i.operands) - 1, ftz)


@handles("copysign")
def copy_sign(d: Decoder, i: Instruction) -> Step:
    m, kind, *_ = common(i)
    m.done()
    return d.pure(i, lambda a, b: np.copysign(b, a), kind, [kind, kind])


@handles("testp")
def classify(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = m.type()
    which = m.one_of(("finite", "infinite", "number", "notanumber", "normal", "subnormal"))
    m.done()
    if kind not in ("f32", "f64") or not which:
        raise unknown(i, "this property")

    def normal(a: Array) -> Array:
        return np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny)

    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": normal,
        "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
    }
    return d.pure(i, tests[which], "pred", [kind])


# --- functions. The approximate ones are computed in float64 and rounded once: better than the hardware's, which is
# --- within a few units in the last place, so a kernel's error bound must leave room for that.


def _in_float64(function: Function) -> Function:
    return lambda a: function(a.astype(np.float64)).astype(np.float32)


FUNCTIONS: dict[str, Function] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@handles(*FUNCTIONS)
def function(d: Decoder, i: Instruction) -> Step:
    m, kind, mode, ftz, _ = common(i)
    approximate = m.flag("approx")
    m.done()
    compute = FUNCTIONS[i.opcode]
    if not approximate and i.opcode not in ("rcp", "sqrt"):
        raise unknown(i, "this function without .approx")
    if kind == "f64":
        if mode not in ("", "rn") or i.opcode not in ("rcp", "sqrt", "rsqrt", "ex2"):
            raise unknown(i, "this function for .f64")
        return arithmetic(d, i, kind, lambda x: compute(x).astype(np.float64), 1)
    if mode not in ("", "rn"):
        raise unknown(i, f".{mode} here")
    return arithmetic(d, i, kind, _in_float64(compute), 1, ftz)
