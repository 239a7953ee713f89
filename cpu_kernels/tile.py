"""The register tile: a few rows of activations times a few panels of 16 weight columns, all sums kept in registers.

    out[r, 16 p + lane] (+)= sum over k of x[r, k] * panel_p[k, lane]  (+ bias[16 p + lane])

Written as LLVM IR because the point is which values live in registers. Each output is one chain of fused multiply-adds
over k in order, whatever the tile: results do not depend on how many rows or panels share it. Weights, K blocks and V
blocks are all panels, so the matrix product and both products of attention are this one function.

A panel's k steps come in `segments` (a V panel continues in the next block): panel p of segment g starts at
    table[g * segment_step + p * panel_step] + panel_offset + p * panel_stride                              (bytes)
and its next k step lies `step_stride` bytes on. One step is one k of 16 float32, or two k (even in the low half) of 16
bfloat16 pairs. Every segment has `k` elements but the last, which has `last_k`; x runs on through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from .jit import instruction
from .memory import INT64, POINTER
from .variant import BFLOAT16, FLOAT32, FORMAT_NAMES, Isa, Variant
from .vectors import FLOATS, INTS, float_constant, int_constant, multiply_add, splat_value

BYTE = ir.IntType(8)
ARGUMENTS = (
    "x", "x_stride", "table", "segment_step", "panel_step", "panel_stride", "panel_offset", "segments", "k", "last_k", "step_stride",
    "out", "out_stride", "bias", "accumulate",
)  # fmt: skip

Values = list[Any]  # LLVM values
Body = Callable[[Any, Sequence[Any]], Values]


# -- one step over k, per weight format -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """How one step over k is computed. `emit(builder, sums, weights, xs, odd)` returns the new sums.

    `weights` are pointers to each panel's 16 lanes, `xs` pointers to each row's next activation, `sums[r][p]` vectors;
    `odd`: the step's second k does not exist.
    """

    k_per_step: int
    unroll: int
    emit: Callable[[Any, list[Values], Values, Values, bool], list[Values]]


def _accumulate(builder: Any, sums: list[Values], weights: Values, xs: Values, k: int) -> list[Values]:
    """sums[r][p] += x[r, k] * weights[p]."""
    out = []
    for row, x in zip(sums, xs, strict=True):
        scalar = builder.load(builder.gep(x, [INT64(4 * k)], source_etype=BYTE), align=4, typ=ir.FloatType())
        lanes = splat_value(builder, scalar)
        out.append([multiply_add(builder, lanes, w, s) for w, s in zip(weights, row, strict=True)])
    return out


def _step_float32(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool) -> list[Values]:
    values = [builder.load(w, align=4, typ=FLOATS) for w in weights]
    return _accumulate(builder, sums, values, xs, 0)


def _step_bfloat16(builder: Any, sums: list[Values], weights: Values, xs: Values, odd: bool) -> list[Values]:
    pairs = [builder.load(w, align=4, typ=INTS) for w in weights]
    even = [builder.bitcast(builder.shl(pair, int_constant(16)), FLOATS) for pair in pairs]
    sums = _accumulate(builder, sums, even, xs, 0)
    if odd:
        return sums
    high = int_constant(0xFFFF0000 - (1 << 32))
    return _accumulate(builder, sums, [builder.bitcast(builder.and_(p, high), FLOATS) for p in pairs], xs, 1)


STEPS = {FLOAT32: Step(1, 4, _step_float32), BFLOAT16: Step(2, 2, _step_bfloat16)}


# -- the tile ---------------------------------------------------------------------------------------------------------


def _loop(builder: Any, count: Any, carried: Sequence[Any], body: Body) -> Values:
    """Repeat `body` `count` times (perhaps never); it maps the index and the carried values to their next ones."""
    before = builder.block
    inside = builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, INT64(0)), inside, after)
    builder.position_at_end(inside)
    index = builder.phi(INT64)
    current = [builder.phi(value.type) for value in carried]
    following = body(index, current)
    following_index = builder.add(index, INT64(1))
    latch = builder.block
    builder.cbranch(builder.icmp_signed("<", following_index, count), inside, after)
    for phi, first, value in zip([index, *current], [INT64(0), *carried], [following_index, *following], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, latch)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in carried]
    for phi, first, value in zip(results, carried, following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, latch)
    return results


class _TileEmitter:
    """Writes the body of one tile function of `rows` rows and `width` panels."""

    def __init__(self, function: ir.Function, step: Step, rows: int, width: int) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.arguments = dict(zip(ARGUMENTS, function.args, strict=True))
        self.step, self.rows, self.width = step, rows, width

    def offset(self, pointer: Any, byte_offset: Any) -> Any:
        return self.builder.gep(pointer, [byte_offset], source_etype=BYTE)

    def nested(self, flat: Sequence[Any]) -> list[Values]:
        """sums[r][p] of a flat list."""
        return [list(flat[r * self.width : (r + 1) * self.width]) for r in range(self.rows)]

    def emit(self) -> None:
        builder, a = self.builder, self.arguments
        x = builder.inttoptr(a["x"], POINTER)
        self.x_rows = [self.offset(x, builder.mul(a["x_stride"], INT64(r))) for r in range(self.rows)]
        sums = [float_constant(0.0)] * (self.rows * self.width)
        last = builder.sub(a["segments"], INT64(1))
        odd = self.step.k_per_step > 1

        def segment(index: Any, current: Sequence[Any]) -> Values:
            x_offset, table, *flat = current
            k = builder.select(builder.icmp_signed("==", index, last), a["last_k"], a["k"])
            x_offset, flat = self.segment(table, k, x_offset, flat, odd)
            return [x_offset, builder.add(table, a["segment_step"]), *flat]

        _, _, *sums = _loop(builder, a["segments"], [INT64(0), a["table"], *sums], segment)
        self.write(self.nested(sums))
        builder.ret_void()

    def segment(self, table: Any, k: Any, x_offset: Any, sums: Values, odd: bool) -> tuple[Any, Values]:
        builder, a, step = self.builder, self.arguments, self.step
        panels = []
        for p in range(self.width):
            entry = builder.add(table, builder.mul(a["panel_step"], INT64(p)))
            start = builder.load(builder.inttoptr(entry, POINTER), align=8, typ=INT64)
            start = builder.add(start, builder.add(a["panel_offset"], builder.mul(a["panel_stride"], INT64(p))))
            panels.append(builder.inttoptr(start, POINTER))
        steps = builder.sdiv(k, INT64(step.k_per_step)) if step.k_per_step > 1 else k
        unrolled = builder.sdiv(steps, INT64(step.unroll))
        rest = builder.sub(steps, builder.mul(unrolled, INT64(step.unroll)))

        def steps_body(repeat: int, half: bool = False) -> Body:
            def body(index: Any, current: Sequence[Any]) -> Values:
                x_at, w_at, *flat = current
                nested = self.nested(flat)
                for _ in range(repeat):
                    weights = [self.offset(panel, w_at) for panel in panels]
                    xs = [self.offset(row, x_at) for row in self.x_rows]
                    nested = step.emit(builder, nested, weights, xs, half)
                    x_at = builder.add(x_at, INT64(4 * step.k_per_step))
                    w_at = builder.add(w_at, a["step_stride"])
                return [x_at, w_at, *(value for row in nested for value in row)]

            return body

        carried = _loop(builder, unrolled, [x_offset, INT64(0), *sums], steps_body(step.unroll))
        carried = _loop(builder, rest, carried, steps_body(1))
        if odd:
            carried = _loop(builder, builder.and_(k, INT64(1)), carried, steps_body(1, half=True))
        return carried[0], carried[2:]

    def write(self, sums: list[Values]) -> None:
        builder, a = self.builder, self.arguments
        out = builder.inttoptr(a["out"], POINTER)
        addresses = [
            [
                self.offset(out, builder.add(builder.mul(a["out_stride"], INT64(r)), INT64(64 * p)))
                for p in range(self.width)
            ]
            for r in range(self.rows)
        ]
        flat = [value for row in sums for value in row]

        def add_bias(index: Any, current: Sequence[Any]) -> Values:
            bias = builder.inttoptr(a["bias"], POINTER)
            lanes = [builder.load(self.offset(bias, INT64(64 * p)), align=4, typ=FLOATS) for p in range(self.width)]
            return [builder.fadd(value, lanes[i % self.width]) for i, value in enumerate(current)]

        def add_existing(index: Any, current: Sequence[Any]) -> Values:
            places = [address for row in addresses for address in row]
            return [
                builder.fadd(value, builder.load(place, align=4, typ=FLOATS))
                for value, place in zip(current, places, strict=True)
            ]

        has_bias = builder.zext(builder.icmp_signed("!=", a["bias"], INT64(0)), INT64)
        flat = _loop(builder, has_bias, flat, add_bias)
        flat = _loop(builder, a["accumulate"], flat, add_existing)
        for value, place in zip(flat, (address for row in addresses for address in row), strict=True):
            builder.store(value, place, align=4)


def tile_function(module: ir.Module, isa: Isa, weight_format: int, rows: int, width: int) -> ir.Function:
    """The tile of `rows` rows and `width` panels in `module`; all arguments are int64."""
    name = f"kvpool.tile.{isa.name}.{FORMAT_NAMES[weight_format]}.{rows}x{width}"
    existing = module.globals.get(name)
    if existing is not None:
        return existing
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * len(ARGUMENTS)), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    _TileEmitter(function, STEPS[weight_format], rows, width).emit()
    return function


# -- what kernels call ------------------------------------------------------------------------------------------------


@instruction
def tile(typing_context: Any, variant: Any, weight_format: Any, rows: Any, width: Any, arguments: Any) -> Any:
    """Run the tile of `weight_format`, `rows` and `width` on a tuple of `ARGUMENTS`. Unknown combinations do nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        which: Variant = variant.variant
        _, number, row_count, panel_count, packed = values
        operands = [builder.extract_value(packed, i) for i in range(len(ARGUMENTS))]
        key = builder.add(builder.mul(number, INT64(1024)), builder.add(builder.mul(row_count, INT64(32)), panel_count))
        done = builder.append_basic_block("tiled")
        switch = builder.switch(key, done)
        for chosen in which.formats:
            for r, widths in enumerate(which.isa.tiles, start=1):
                for w in widths:
                    block = builder.append_basic_block(f"tile.{r}x{w}")
                    switch.add_case(INT64(chosen * 1024 + r * 32 + w), block)
                    with builder.goto_block(block):
                        builder.call(tile_function(builder.module, which.isa, chosen, r, w), operands)
                        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    numbers = types.UniTuple(types.int64, len(ARGUMENTS))
    return types.void(variant, types.int64, types.int64, types.int64, numbers), generate


@instruction
def widest_tile(typing_context: Any, variant: Any, rows: Any, panels: Any) -> Any:
    """The widest tile of `rows` rows that fits in `panels` panels."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        isa: Isa = variant.variant.isa
        result = INT64(1)
        for r, widths in enumerate(isa.tiles, start=1):
            here = builder.icmp_signed("==", values[1], INT64(r))
            for w in reversed(widths):
                fits = builder.and_(here, builder.icmp_signed(">=", values[2], INT64(w)))
                result = builder.select(fits, INT64(w), result)
        return result

    return types.int64(variant, types.int64, types.int64), generate


@instruction
def max_tile_rows(typing_context: Any, variant: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return INT64(variant.variant.isa.max_rows)

    return types.int64(variant), generate


@instruction
def kv_format(typing_context: Any, variant: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return INT64(variant.variant.kv_format)

    return types.int64(variant), generate
