"""The register tile: a few rows of activations times a few panels of 16 weight columns, all sums kept in registers.

    out[r, 16 p + lane] (+)= sum over k of x[r, k] * panel_p[k, lane]  (+ bias[16 p + lane])

Written as LLVM IR because the point is which values live in registers. An output is a chain of fused multiply-adds over
k in order, whatever the tile: results do not depend on how many rows or panels share it. Weights, K blocks and V blocks
are all panels, so the matrix product and both products of attention are this one function.

The k are divided into `blocks`, each a chain from zero whose result is added to the total, because rounding errors of a
chain grow with its length. Totals start at zero, or at `totals` where a call before this one left them. A block's k
come in `segments` (a V panel continues in the next block of the pool). Panel p of segment g of block b starts at
    table[g * segment_step + p * panel_step] + panel_offset + p * panel_stride + b * block_stride           (bytes)
and its next step lies `step_stride` bytes on. One step is one k of 16 float32, two k (even in the low half) of 16
bfloat16 pairs, or a group of k (see `steps`). Every segment has `k` elements but the very last, which has `last_k`;
x runs on through all of them.

A tile repeats this for `groups` groups of panels, one behind the other, and all that for `cuts` cuts of as many rows,
one below the other. Meanwhile it asks for memory that will be read later: in each step one cache line for each of its
panels, `ahead_stride` bytes further each step of a segment (or of all blocks, where a block is one segment). In segment
g of the group that starts with panel p, in cut c, it starts at
    ahead_table[p * ahead_step + g * ahead_segment_step] + ahead_offset + p * ahead_forward + c * ahead_cut
Where a step reads several lines of a panel and there is one cut, it asks for each as it reads the same line of a panel
before, `distance` bytes ahead: of the next group of panels, or, where those are long, near in the same ones. With tall
tiles each of two cuts does so too, and each of any where panels are long: they would have to ask for many lines at
once, and reads from the second level wait until those have come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from .activations import emit_encode, encode_name
from .emit import BYTE, Body, Values, loop
from .groups import HELD_AS
from .isa import FORMAT_NAMES, Isa
from .memory import INT64, POINTER, prefetch
from .packing import step_bytes
from .steps import ROUNDING, Step, emit_rounding, step_of, x_unit
from .unpacking import emit_unpack, unpack_name
from .vectors import FLOATS, float_constant

ARGUMENTS = (
    "x", "x_stride", "cuts", "groups", "table", "segment_step", "panel_step", "panel_stride", "panel_offset",
    "blocks", "block_stride", "segments", "k", "last_k", "step_stride", "totals", "totals_stride",
    "out", "out_stride", "bias", "accumulate",
    "ahead_table", "ahead_step", "ahead_segment_step", "ahead_offset", "ahead_forward", "ahead_stride",
    "ahead_cut",
)  # fmt: skip


FAR = 64 * 1024  # bytes that surely stay in the second level
NEAR = 4 * 1024
LONG = 128 * 1024  # bytes of a group of panels


# -- the tile ---------------------------------------------------------------------------------------------------------


class _TileEmitter:
    """Writes the body of one tile function of `rows` rows and `width` panels; the tallest tile has `tallest` rows."""

    def __init__(
        self, function: ir.Function, step: Step, rows: int, width: int, *, tallest: int, shares_all: bool
    ) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.arguments = dict(zip(ARGUMENTS, function.args, strict=True))
        self.step, self.rows, self.width = step, rows, width
        self.shares_all = shares_all
        self.always_alone = 2 * rows <= tallest  # more than the tallest are cut evenly: in no more than halves

    def offset(self, pointer: Any, byte_offset: Any) -> Any:
        return self.builder.gep(pointer, [byte_offset], source_etype=BYTE)

    def nested(self, flat: Sequence[Any]) -> list[Values]:
        """sums[r][p] of a flat list."""
        return [list(flat[r * self.width : (r + 1) * self.width]) for r in range(self.rows)]

    def emit(self) -> None:
        builder = self.builder
        if self.step.lines and not self.always_alone:
            with builder.if_else(self.asks_alone()) as (alone, together):
                with alone:
                    self.cuts(alone=True)
                with together:
                    self.cuts(alone=False)
        else:
            self.cuts(alone=self.step.lines > 0)
        builder.ret_void()

    def asks_alone(self) -> Any:
        """Whether each cut asks as it reads."""
        builder, a = self.builder, self.arguments
        if self.shares_all:
            return builder.icmp_signed("==", a["cuts"], INT64(1))
        bytes_read = builder.mul(a["panel_stride"], INT64(self.width))
        is_long = builder.icmp_signed(">", bytes_read, INT64(LONG))
        return builder.or_(is_long, builder.icmp_signed("<=", a["cuts"], INT64(2)))

    def cuts(self, alone: bool) -> None:
        """All cuts; `alone`: each asks as it reads."""
        builder, a, self.alone = self.builder, self.arguments, alone

        def cut(index: Any, current: Sequence[Any]) -> Values:
            self.cut = index
            x = builder.inttoptr(self.in_cut("x", "x_stride"), POINTER)
            self.x_rows = [self.offset(x, builder.mul(a["x_stride"], INT64(r))) for r in range(self.rows)]
            ahead = builder.add(a["ahead_offset"], builder.mul(index, a["ahead_cut"]))
            loop(builder, a["groups"], [], lambda number, _: self.group(number, ahead))
            return []

        loop(builder, a["cuts"], [], cut)

    def in_cut(self, base: str, stride: str) -> Any:
        """Where the cut's rows begin in a matrix."""
        below = self.builder.mul(self.cut, self.builder.mul(self.arguments[stride], INT64(self.rows)))
        return self.builder.add(self.arguments[base], below)

    def group(self, index: Any, ahead: Any) -> Values:
        """One group of panels. Results go to lines that few caches hold, and stores become visible in order: one that
        waits for its line holds up all behind it, so the lines are asked for before the sums begin."""
        builder, a = self.builder, self.arguments
        panel = builder.mul(index, INT64(self.width))
        table = builder.add(a["table"], builder.mul(panel, a["panel_step"]))
        offset = builder.add(a["panel_offset"], builder.mul(panel, a["panel_stride"]))
        ahead_table = builder.add(a["ahead_table"], builder.mul(panel, a["ahead_step"]))
        ahead = builder.add(ahead, builder.mul(panel, a["ahead_forward"]))
        column, zeros = builder.mul(panel, INT64(64)), [float_constant(0.0)] * (self.rows * self.width)
        for place in self.places("out", "out_stride", column):
            prefetch(builder, place, to_write=True)
        totals = self.blocks((table, ahead_table), offset, ahead, zeros, self.start(zeros, column))
        self.write(self.nested(totals), column)
        return []

    def places(self, base: str, stride: str, column: Any) -> Values:
        """Pointers to the group's vectors, row by row; `column` is the group's offset in bytes."""
        builder = self.builder
        start = builder.inttoptr(builder.add(self.in_cut(base, stride), column), POINTER)
        rows = [self.offset(start, builder.mul(self.arguments[stride], INT64(r))) for r in range(self.rows)]
        return [self.offset(row, INT64(64 * p)) for row in rows for p in range(self.width)]

    def start(self, zeros: Values, column: Any) -> Values:
        """The totals before the first block."""
        builder, a = self.builder, self.arguments

        def load(index: Any, current: Sequence[Any]) -> Values:
            places = self.places("totals", "totals_stride", column)
            return [builder.load(place, align=4, typ=FLOATS) for place in places]

        given = builder.zext(builder.icmp_signed("!=", a["totals"], INT64(0)), INT64)
        return loop(builder, given, zeros, load)

    def blocks(self, tables: tuple[Any, Any], offset: Any, ahead: Any, zeros: Values, totals: Values) -> Values:
        """The totals of one group."""
        builder, a = self.builder, self.arguments

        def block(index: Any, current: Sequence[Any]) -> Values:
            x_offset, ahead, start, *totals = current
            is_last = builder.icmp_signed("==", index, builder.sub(a["blocks"], INT64(1)))
            x_offset, ahead, *sums = self.segments(is_last, tables, start, ahead, [x_offset, *zeros])
            totals = [builder.fadd(total, value) for total, value in zip(totals, sums, strict=True)]
            return [x_offset, ahead, builder.add(start, a["block_stride"]), *totals]

        return loop(builder, a["blocks"], [INT64(0), ahead, offset, *totals], block)[3:]

    def segments(self, last_block: Any, tables: tuple[Any, Any], start: Any, ahead: Any, carried: Values) -> Values:
        """One chain through the segments of a block: x offset, offset ahead after the last, and the sums."""
        builder, a = self.builder, self.arguments
        last_segment = builder.sub(a["segments"], INT64(1))

        def segment(index: Any, current: Sequence[Any]) -> Values:
            table, ahead_table, _, x_offset, *sums = current
            is_last = builder.and_(last_block, builder.icmp_signed("==", index, last_segment))
            k = builder.select(is_last, a["last_k"], a["k"])
            base = builder.load(builder.inttoptr(ahead_table, POINTER), align=8, typ=INT64)
            x_offset, reached, *sums = self.segment(table, start, k, [x_offset, builder.add(base, ahead), *sums])
            tables = builder.add(table, a["segment_step"]), builder.add(ahead_table, a["ahead_segment_step"])
            return [*tables, builder.sub(reached, base), x_offset, *sums]

        _, _, ahead, x_offset, *sums = loop(builder, a["segments"], [*tables, ahead, *carried], segment)
        return [x_offset, ahead, *sums]

    def segment(self, table: Any, offset: Any, k: Any, carried: Values) -> Values:
        """`k` elements from `offset` past the table's entries on; carries (x offset, address ahead, *sums)."""
        builder, a, step = self.builder, self.arguments, self.step
        panels = []
        for p in range(self.width):
            entry = builder.add(table, builder.mul(a["panel_step"], INT64(p)))
            start = builder.load(builder.inttoptr(entry, POINTER), align=8, typ=INT64)
            start = builder.add(start, builder.add(offset, builder.mul(a["panel_stride"], INT64(p))))
            panels.append(builder.inttoptr(start, POINTER))
        distance = self.distance() if self.alone else None
        steps = builder.sdiv(k, INT64(step.k_per_step)) if step.k_per_step > 1 else k
        unrolled = builder.sdiv(steps, INT64(step.unroll))
        rest = builder.sub(steps, builder.mul(unrolled, INT64(step.unroll)))

        def steps_body(repeat: int, half: bool = False) -> Body:
            def body(index: Any, current: Sequence[Any]) -> Values:
                x_at, ahead, w_at, *flat = current
                nested = self.nested(flat)
                for _ in range(repeat):
                    if not self.alone:
                        self.ask(ahead)
                    weights = [self.offset(panel, w_at) for panel in panels]
                    xs = [self.offset(row, x_at) for row in self.x_rows]
                    nested = step.emit(builder, nested, weights, xs, half, distance)
                    x_at = builder.add(x_at, INT64(step.x_bytes))
                    w_at = builder.add(w_at, a["step_stride"])
                    ahead = builder.add(ahead, a["ahead_stride"])
                return [x_at, ahead, w_at, *(value for row in nested for value in row)]

            return body

        carried = [*carried[:2], INT64(0), *carried[2:]]
        carried = loop(builder, unrolled, carried, steps_body(step.unroll))
        carried = loop(builder, rest, carried, steps_body(1))
        if step.k_per_step == 2:
            carried = loop(builder, builder.and_(k, INT64(1)), carried, steps_body(1, half=True))
        return [*carried[:2], *carried[3:]]

    def distance(self) -> Any:
        """How far ahead a cut asks alone: to the next group of panels, if that stays in the second level till then."""
        builder, a = self.builder, self.arguments
        far = builder.mul(a["panel_stride"], INT64(self.width))
        return builder.select(builder.icmp_signed(">", far, INT64(FAR)), INT64(NEAR), far)

    def ask(self, ahead: Any) -> None:
        """Ask for what is read later: lines for each panel from `ahead` on."""
        for line in range(self.width * self.step.lines_ahead):
            prefetch(self.builder, self.builder.inttoptr(self.builder.add(ahead, INT64(64 * line)), POINTER))

    def write(self, sums: list[Values], column: Any) -> None:
        """Add bias and what is there, where asked to, and store; `column` is the group's offset in bytes."""
        builder, a = self.builder, self.arguments
        places = self.places("out", "out_stride", column)

        def add_bias(index: Any, current: Sequence[Any]) -> Values:
            bias = builder.inttoptr(builder.add(a["bias"], column), POINTER)
            lanes = [builder.load(self.offset(bias, INT64(64 * p)), align=4, typ=FLOATS) for p in range(self.width)]
            return [builder.fadd(value, lanes[i % self.width]) for i, value in enumerate(current)]

        def add_existing(index: Any, current: Sequence[Any]) -> Values:
            existing = [builder.load(place, align=4, typ=FLOATS) for place in places]
            return [builder.fadd(value, there) for value, there in zip(current, existing, strict=True)]

        has_bias = builder.zext(builder.icmp_signed("!=", a["bias"], INT64(0)), INT64)
        flat = loop(builder, has_bias, [value for row in sums for value in row], add_bias)
        flat = loop(builder, a["accumulate"], flat, add_existing)
        for value, place in zip(flat, places, strict=True):
            builder.store(value, place, align=4)


# -- all tiles of a processor -----------------------------------------------------------------------------------------


def tile_name(weight_format: int, rows: int, width: int) -> str:
    return f"tile_{FORMAT_NAMES[weight_format]}_{rows}x{width}"


def tiles_module(isa: Isa, formats: Sequence[int]) -> ir.Module:
    """One function for each format, number of rows and width; their names are `tile_name`'s."""
    module = ir.Module(f"kvpool_tiles_{isa.name}")
    kind = ir.FunctionType(ir.VoidType(), [INT64] * len(ARGUMENTS))
    for weight_format in formats:
        for rows, widths in enumerate(isa.tiles[weight_format], start=1):
            for width in widths:
                function = ir.Function(module, kind, tile_name(weight_format, rows, width))
                tallest = len(isa.tiles[weight_format])
                step = step_of(weight_format)
                _TileEmitter(function, step, rows, width, tallest=tallest, shares_all=isa.shares_all).emit()
        if weight_format in isa.unpacked:
            emit_unpack(module, weight_format, isa.unpacked[weight_format])
        if weight_format in HELD_AS:
            emit_encode(module, weight_format)
    emit_rounding(module)
    return module


def _rounding_name(weight_format: int) -> str:
    return encode_name(weight_format) if weight_format in HELD_AS else ROUNDING


def tile_names(isa: Isa, formats: Sequence[int]) -> list[str]:
    shapes = [(f, r, widths) for f in formats for r, widths in enumerate(isa.tiles[f], start=1)]
    others = list(dict.fromkeys([ROUNDING, *(_rounding_name(f) for f in formats)]))
    unpacking = [unpack_name(f, isa.unpacked[f]) for f in formats if f in isa.unpacked]
    return [*others, *unpacking, *(tile_name(f, r, w) for f, r, widths in shapes for w in widths)]


# Kernels find a tile at [format, rows, panels]: the address and width of the widest one that fits in `panels` panels.
# [format, 0, 0] holds the most rows that a tile has, and the bytes of a panel that a step reads; [format, 0, 1] the
# address of the function that rounds rows; [format, 0, 2] the columns and bytes of a unit of x (see `rounding`);
# [format, 0, 3] the address of the function that unpacks a panel, 0: none, and the format that it is unpacked to.
TABLE_SHAPE = (32, 16, 16, 2)


def tile_table(isa: Isa, formats: Sequence[int], addresses: Mapping[str, int]) -> NDArray[np.int64]:
    """TABLE_SHAPE int64, from the address of every tile by name."""
    table = np.zeros(TABLE_SHAPE, dtype=np.int64)
    for weight_format in formats:
        table[weight_format, 0, 0] = len(isa.tiles[weight_format]), step_bytes(weight_format)
        table[weight_format, 0, 1, 0] = addresses[_rounding_name(weight_format)]
        table[weight_format, 0, 2] = x_unit(weight_format)
        if weight_format in isa.unpacked:
            unpacked = isa.unpacked[weight_format]
            table[weight_format, 0, 3] = addresses[unpack_name(weight_format, unpacked)], unpacked
        for rows, widths in enumerate(isa.tiles[weight_format], start=1):
            for width in reversed(widths):
                entry = addresses[tile_name(weight_format, rows, width)], width
                table[weight_format, rows, width:] = entry
    return table
