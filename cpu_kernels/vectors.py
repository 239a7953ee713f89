"""A vector of 16 float32 lanes as a Numba type, so that kernels say which lanes they mean instead of hoping.

LLVM splits a vector into what the processor has (one AVX-512 register, two AVX, four SSE or NEON); the result is the
same bits on all of them. `a + b`, `a - b`, `a * b` and `a / b` work; everything else is a function below.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.core.typing.templates import signature as make_signature
from numba.extending import models, register_model

from .isa import host_fuses
from .jit import instruction
from .memory import POINTER

LANES = 16
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
Vector = Any  # what a kernel's annotation calls a value of type `vector`


class VectorType(types.Type):  # type: ignore[misc]
    """16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, FLOATS)


def _operator(python_operator: Callable[..., Any], llvm_name: str) -> None:
    @infer_global(python_operator)
    class Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, arguments: Any, keywords: Any) -> Any:
            return make_signature(vector, vector, vector) if arguments == (vector, vector) else None

    @lower_builtin(python_operator, vector, vector)
    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, llvm_name)(*arguments)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


def vector_call(builder: Any, name: str, *arguments: Any) -> Any:
    """Call an LLVM intrinsic on whole vectors, such as llvm.fma.v16f32."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * len(arguments))
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on whole vectors, rounded once where the processor can."""
    if host_fuses():
        return vector_call(builder, "llvm.fma.v16f32", a, b, c)
    return builder.fadd(builder.fmul(a, b), c)


def splat_value(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """All lanes = scalar (an LLVM value)."""
    kind = ir.VectorType(scalar.type, lanes)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.IntType(32)(0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), order)


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; b where a is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def float_constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def int_constant(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _lane_numbers() -> Any:
    return ir.Constant(INTS, list(range(LANES)))


# -- memory -----------------------------------------------------------------------------------------------------------


@instruction
def load(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], POINTER), align=4, typ=FLOATS)

    return vector(types.int64), generate


@instruction
def store(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], POINTER), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


@instruction
def splat(typing_context: Any, scalar: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat_value(builder, arguments[0])

    return vector(types.float32), generate


# -- lanes ------------------------------------------------------------------------------------------------------------


@instruction
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return multiply_add(builder, *arguments)

    return vector(vector, vector, vector), generate


@instruction
def maximum(typing_context: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; b where a is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return larger(builder, *arguments)

    return vector(vector, vector), generate


@instruction
def select_range(typing_context: Any, first: Any, last: Any, inside: Any, outside: Any) -> Any:
    """`inside` in the lanes first <= lane < last, `outside` in the others, whatever they hold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low, high = (splat_value(builder, builder.trunc(bound, ir.IntType(32))) for bound in arguments[:2])
        above = builder.icmp_signed(">=", _lane_numbers(), low)
        below = builder.icmp_signed("<", _lane_numbers(), high)
        return builder.select(builder.and_(above, below), arguments[2], arguments[3])

    return vector(types.int64, types.int64, vector, vector), generate


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce the lanes as a tree: lane i with lane i + 8, then i + 4, i + 2, i + 1."""
    width = LANES // 2
    while width:
        mask = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
        value = combine(value, builder.shuffle_vector(value, ir.Constant(FLOATS, ir.Undefined), mask))
        width //= 2
    return builder.extract_element(value, ir.IntType(32)(0))


def lanes_sum(builder: Any, value: Any) -> Any:
    return _fold(builder, value, builder.fadd)


def integer_lanes_sum(builder: Any, value: Any) -> Any:
    """The sum of integer lanes, modulo 2^32."""
    name, kind = "llvm.vector.reduce.add.v16i32", ir.FunctionType(ir.IntType(32), [INTS])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [value])


def largest_lane(builder: Any, value: Any) -> Any:
    return _fold(builder, value, partial(larger, builder))


@instruction
def sum_lanes(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return lanes_sum(builder, arguments[0])

    return types.float32(vector), generate


@instruction
def max_lanes(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return largest_lane(builder, arguments[0])

    return types.float32(vector), generate


# -- elementary functions ---------------------------------------------------------------------------------------------

_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Moshier, Cephes `expf`), highest power first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp_value(builder: Any, x: Any) -> Any:
    """exp of an LLVM vector, within 2 units in the last place on [-87.3, 88]; clamped outside, NaN stays NaN."""

    low, high = float_constant(-87.3), float_constant(88.0)
    clamped = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    clamped = builder.select(builder.fcmp_ordered(">", clamped, high), high, clamped)
    shifted = multiply_add(builder, clamped, float_constant(_LOG2_E), float_constant(_ROUND))
    power = builder.fsub(shifted, float_constant(_ROUND))
    r = multiply_add(builder, power, float_constant(-_LN2_HIGH), clamped)
    r = multiply_add(builder, power, float_constant(-_LN2_LOW), r)
    polynomial = float_constant(_EXP[0])
    for coefficient in _EXP[1:]:
        polynomial = multiply_add(builder, polynomial, r, float_constant(coefficient))
    mantissa = builder.fadd(multiply_add(builder, polynomial, builder.fmul(r, r), r), float_constant(1.0))
    exponent = builder.shl(builder.bitcast(shifted, INTS), int_constant(23))
    result = builder.bitcast(builder.add(builder.bitcast(mantissa, INTS), exponent), FLOATS)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


@instruction
def exp(typing_context: Any, x: Any) -> Any:
    """See `exp_value`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return exp_value(builder, arguments[0])

    return vector(vector), generate
