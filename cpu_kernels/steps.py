"""One step of a tile over k, for each weight format, and the rounding of activations that one of them needs.

A new format is a new step: how to turn the panel's lanes into numbers, and how many k they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .activations import form_of
from .emit import BYTE, Values, loop
from .group_steps import grouped_step
from .groups import GROUP_FORMATS, HELD_AS, SPREAD_FORMATS
from .integer_steps import integer_step
from .isa import BFLOAT16, BFLOAT16_DOT, CODES, FLOAT16, FLOAT32, host_has_dot
from .memory import INT64, POINTER
from .vectors import FLOATS, INTS, LANES, int_constant, multiply_add, splat_value

ROUNDING = "round_rows"
CUTS = 6  # that share the asking where many sequences decode: of 32 rows
LINES_AHEAD = 5  # of a group that is not unpacked yet, which has up to 10: two tiles or more share the asking
HALVES, CODE_LANES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(ir.IntType(8), LANES)
_LOW_HALF, _HIGH_HALF = 0x0000FFFF, 0xFFFF0000 - (1 << 32)


Emit = Callable[[Any, list[Values], Values, Values, bool, Any], list[Values]]


@dataclass(frozen=True, slots=True)
class Step:
    """How one step over k is computed. `emit(builder, sums, weights, xs, odd, distance)` returns the new sums.

    `weights` are pointers to each panel's 16 lanes, `xs` pointers to each row's next activation, `sums[r][p]` vectors;
    `odd`: the step's second k does not exist. `x_bytes` is what a step takes of a row of x. `lines`: cache lines
    of a panel that it reads, where it can ask for the line that lies `distance` bytes behind each of them; where not,
    or with None as distance, the tile asks for `lines_ahead` from the address on that it is given.
    """

    k_per_step: int
    x_bytes: int
    unroll: int
    emit: Emit
    lines: int = 0
    lines_ahead: int = 1


def step_of(weight_format: int) -> Step:
    if weight_format in HELD_AS or weight_format in SPREAD_FORMATS:
        form, held = form_of(weight_format), HELD_AS.get(weight_format)

        def integer(b: Any, sums: list[Values], w: Values, xs: Values, odd: bool, distance: Any) -> list[Values]:
            return integer_step(b, weight_format, sums, w, xs, distance)

        return _group_step(form.size, form.bytes, integer, 0 if held is None else GROUP_FORMATS[held].lines)
    if weight_format in GROUP_FORMATS:

        def grouped(b: Any, sums: list[Values], w: Values, xs: Values, odd: bool, distance: Any) -> list[Values]:
            return grouped_step(b, weight_format, sums, w, xs, distance)

        group = GROUP_FORMATS[weight_format]
        return _group_step(group.size, 4 * group.size, grouped, group.lines)
    return {
        FLOAT32: Step(1, 4, 4, _float32),
        BFLOAT16: Step(2, 8, 2, _bfloat16),
        FLOAT16: Step(1, 4, 4, _float16),
        CODES: Step(1, 4, 4, _codes),
        BFLOAT16_DOT: Step(2, 4, 2, _dot if host_has_dot() else _emulated_dot),
    }[weight_format]


def _group_step(size: int, x_bytes: int, emit: Emit, lines: int) -> Step:
    return Step(size, x_bytes, 1, emit, lines, max(LINES_AHEAD, -(-lines // CUTS)))


def x_unit(weight_format: int) -> tuple[int, int]:
    """Columns and bytes of what a row of x consists of."""
    if weight_format in HELD_AS or weight_format in SPREAD_FORMATS:
        return form_of(weight_format).size, form_of(weight_format).bytes
    return (32, 64) if weight_format == BFLOAT16_DOT else (1, 4)


def _accumulate(builder: Any, sums: list[Values], weights: Values, xs: Values, k: int) -> list[Values]:
    """sums[r][p] += x[r, k] * weights[p]."""
    out = []
    for row, x in zip(sums, xs, strict=True):
        scalar = builder.load(builder.gep(x, [INT64(4 * k)], source_etype=BYTE), align=4, typ=ir.FloatType())
        lanes = splat_value(builder, scalar)
        out.append([multiply_add(builder, lanes, w, s) for w, s in zip(weights, row, strict=True)])
    return out


def _float32(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool, _: Any) -> list[Values]:
    return _accumulate(builder, sums, [builder.load(w, align=4, typ=FLOATS) for w in weights], xs, 0)


def _float16(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool, _: Any) -> list[Values]:
    halves = [builder.load(w, align=2, typ=HALVES) for w in weights]
    return _accumulate(builder, sums, [builder.fpext(half, FLOATS) for half in halves], xs, 0)


def _codes(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool, _: Any) -> list[Values]:
    wide = [builder.sext(builder.load(w, align=1, typ=CODE_LANES), INTS) for w in weights]
    return _accumulate(builder, sums, [builder.sitofp(codes, FLOATS) for codes in wide], xs, 0)


def _low(builder: Any, pair: Any) -> Any:
    """The even k of a vector of bfloat16 pairs, as float32."""
    return builder.bitcast(builder.shl(pair, int_constant(16)), FLOATS)


def _high(builder: Any, pair: Any) -> Any:
    return builder.bitcast(builder.and_(pair, int_constant(_HIGH_HALF)), FLOATS)


def bfloat16_pair(builder: Any, pointer: Any) -> tuple[Any, Any]:
    """Both k of 16 pairs as float32."""
    pair = builder.load(pointer, align=4, typ=INTS)
    return _low(builder, pair), _high(builder, pair)


def _bfloat16(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool, _: Any) -> list[Values]:
    pairs = [builder.load(w, align=4, typ=INTS) for w in weights]
    sums = _accumulate(builder, sums, [_low(builder, pair) for pair in pairs], xs, 0)
    return sums if odd else _accumulate(builder, sums, [_high(builder, pair) for pair in pairs], xs, 1)


# -- pairs of bfloat16 activations ------------------------------------------------------------------------------------


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _dot_operands(builder: Any, weights: Values, xs: Values, odd: bool) -> tuple[Values, Values]:
    """Vectors of pairs: each panel's, and each row's next pair in all lanes."""
    pairs = [builder.load(w, align=4, typ=INTS) for w in weights]
    if odd:
        pairs = [builder.and_(pair, int_constant(_LOW_HALF)) for pair in pairs]
    return pairs, [splat_value(builder, builder.load(x, align=4, typ=ir.IntType(32))) for x in xs]


def _dot(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool, _: Any) -> list[Values]:
    """VDPBF16PS: sum += low * low + high * high in every lane."""
    kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
    function = _declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind)
    pairs, rows = _dot_operands(builder, weights, xs, odd)
    panels = [builder.bitcast(pair, PAIRS) for pair in pairs]
    out = []
    for row, x in zip(sums, rows, strict=True):
        lanes = builder.bitcast(x, PAIRS)
        out.append([builder.call(function, [s, panel, lanes]) for s, panel in zip(row, panels, strict=True)])
    return out


def _emulated_dot(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool, _: Any) -> list[Values]:
    """The same with two multiply-adds, for processors without the instruction."""
    pairs, rows = _dot_operands(builder, weights, xs, odd)
    panels = [(_low(builder, pair), _high(builder, pair)) for pair in pairs]
    out = []
    for row, x in zip(sums, rows, strict=True):
        low, high = _low(builder, x), _high(builder, x)
        halves = [multiply_add(builder, low, panel[0], s) for s, panel in zip(row, panels, strict=True)]
        out.append([multiply_add(builder, high, panel[1], s) for s, panel in zip(halves, panels, strict=True)])
    return out


def _declare(builder: Any, name: str, kind: ir.FunctionType) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def emit_rounding(module: ir.Module) -> None:
    """round_rows(x, x_stride, out, out_stride, rows, count): float32 rows to bfloat16, `count` times 32 of each row.

    To nearest, ties to even. Strides in bytes. Numbers side by side in memory are the pairs that a dot step loads.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * 6), ROUNDING)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, x_stride, out, out_stride, rows, count = function.args
    emit = _round_native if host_has_dot() else _round_portable

    def row(index: Any, current: Any) -> Values:
        source = builder.inttoptr(builder.add(x, builder.mul(index, x_stride)), POINTER)
        target = builder.inttoptr(builder.add(out, builder.mul(index, out_stride)), POINTER)

        def chunk(number: Any, current: Any) -> Values:
            at = builder.gep(source, [builder.mul(number, INT64(128))], source_etype=BYTE)
            to = builder.gep(target, [builder.mul(number, INT64(64))], source_etype=BYTE)
            emit(builder, at, to)
            return []

        loop(builder, count, [], chunk)
        return []

    loop(builder, rows, [], row)
    builder.ret_void()


def _halves(builder: Any, source: Any) -> tuple[Any, Any]:
    """The 32 floats at `source`."""
    upper = builder.gep(source, [INT64(64)], source_etype=BYTE)
    return builder.load(source, align=4, typ=FLOATS), builder.load(upper, align=4, typ=FLOATS)


def _round_native(builder: Any, source: Any, target: Any) -> None:
    """VCVTNE2PS2BF16, which takes the upper half first."""
    function = _declare(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.FunctionType(PAIRS, [FLOATS, FLOATS]))
    lower, upper = _halves(builder, source)
    builder.store(builder.call(function, [upper, lower]), target, align=4)


def _round_portable(builder: Any, source: Any, target: Any) -> None:
    for number, half in enumerate(_halves(builder, source)):
        bits = builder.bitcast(half, INTS)
        odd = builder.and_(builder.lshr(bits, int_constant(16)), int_constant(1))
        rounded = builder.lshr(builder.add(builder.add(bits, int_constant(0x7FFF)), odd), int_constant(16))
        nan = builder.fcmp_unordered("uno", half, half)
        rounded = builder.select(nan, int_constant(0x7FC0), rounded)
        narrow = builder.trunc(rounded, ir.VectorType(ir.IntType(16), LANES))
        builder.store(narrow, builder.gep(target, [INT64(32 * number)], source_etype=BYTE), align=4)
