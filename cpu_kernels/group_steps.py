"""Code for panels in groups (see `groups`): their weights as float32, and a tile's step over one group.

A tile and `unpacking` compute w = scale * code + least with the same instructions, and a tile goes on with one
multiply-add for each k in order, as the float32 tile does. So a few rows through packed panels, many rows through
unpacked ones, and float32 weights of the same values give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir

from .emit import BYTE, Values
from .groups import GROUP_FORMATS, GroupFormat
from .isa import host_has_half
from .memory import INT64, prefetch
from .vectors import FLOATS, INTS, LANES, float_constant, int_constant, multiply_add, splat_value

HALVES = ir.VectorType(ir.IntType(16), LANES)


def half_values(builder: Any, bits: Any) -> Any:
    """16 float16 as float32, exactly; denormals too, whatever the processor does with those of float32."""
    if host_has_half():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    wide = builder.zext(bits, INTS)
    magnitude = builder.and_(wide, int_constant(0x7FFF))
    shifted = builder.add(builder.shl(magnitude, int_constant(13)), int_constant(112 << 23))
    small = builder.fmul(builder.sitofp(magnitude, FLOATS), float_constant(2.0**-24))
    is_small = builder.icmp_signed("<", magnitude, int_constant(0x0400))
    value = builder.bitcast(builder.select(is_small, builder.bitcast(small, INTS), shifted), INTS)
    sign = builder.shl(builder.and_(wide, int_constant(0x8000)), int_constant(16))
    return builder.bitcast(builder.or_(value, sign), FLOATS)


class _LoadAgain(ir.instructions.LoadInstr):  # type: ignore[misc]
    """A load that LLVM may not merge with an earlier one of the same place: L1 is near, and registers are few."""

    def descr(self, buffer: Any) -> None:
        parts: list[str] = []
        super().descr(parts)
        buffer.append("".join(parts).replace("load ", "load volatile ", 1))


def _load_again(builder: Any, pointer: Any, kind: Any) -> Any:
    load = _LoadAgain(builder.block, pointer, "", kind)
    load.align = 4
    builder._insert(load)
    return load


def _scales(builder: Any, group: GroupFormat, pointer: Any, offset: int) -> Any:
    place = builder.gep(pointer, [INT64(offset)], source_etype=BYTE)
    if group.scale == np.float32:
        return builder.load(place, align=4, typ=FLOATS)
    return half_values(builder, builder.load(place, align=2, typ=HALVES))


def group_scales(builder: Any, group: GroupFormat, pointer: Any) -> tuple[Any, Any]:
    """Scales and least values of the group at `pointer`; these are None where the code of zero is known."""
    scale = _scales(builder, group, pointer, group.codes_bytes)
    if group.has_least:
        return scale, _scales(builder, group, pointer, group.codes_bytes + group.scale_bytes)
    return scale, None


def group_weights(builder: Any, group: GroupFormat, pointer: Any) -> Iterator[Any]:
    """The weights of one group at `pointer`, k after k, 16 columns each.

    Codes are masked where they lie, not shifted: what a code is too large by, the scale is too small by (a power of 2).
    """
    scale, least = group_scales(builder, group, pointer)
    if group.is_signed:
        yield from _signed_weights(builder, group, pointer, scale)
        return
    if least is None:
        least = builder.fmul(scale, float_constant(-float(group.zero)))
    with builder.goto_entry_block():
        kept = builder.alloca(FLOATS)
        kept.align = 64
    builder.store(least, kept, align=64)
    mask, last = (1 << group.bits) - 1, 32 // group.bits - 1
    for place in range(last + 1):
        shift = group.bits * place
        scaled = scale if place in (0, last) else builder.fmul(scale, float_constant(2.0**-shift))
        for word in range(group.words):
            raw = _load_again(builder, builder.gep(pointer, [INT64(64 * word)], source_etype=BYTE), INTS)
            # The topmost code would set the sign where it lies.
            code = (
                builder.lshr(raw, int_constant(shift))
                if place == last
                else builder.and_(raw, int_constant(mask << shift))
            )
            yield multiply_add(builder, builder.sitofp(code, FLOATS), scaled, _load_again(builder, kept, FLOATS))


def _signed_weights(builder: Any, group: GroupFormat, pointer: Any, scale: Any) -> Iterator[Any]:
    for place in range(32 // group.bits):
        for word in range(group.words):
            raw = builder.load(builder.gep(pointer, [INT64(64 * word)], source_etype=BYTE), align=4, typ=INTS)
            topmost = builder.shl(raw, int_constant(32 - group.bits * (place + 1)))
            code = builder.ashr(topmost, int_constant(32 - group.bits))
            yield builder.fmul(builder.sitofp(code, FLOATS), scale)


def ask_line(builder: Any, panels: Values, offset: Any, distance: Any) -> None:
    """Ask for the line that is `distance` bytes, if any, behind the one at `offset` of each panel."""
    if distance is not None:
        for panel in panels:
            prefetch(builder, builder.gep(panel, [builder.add(offset, distance)], source_etype=BYTE))


def grouped_step(
    builder: Any, weight_format: int, sums: list[Values], panels: Values, xs: Values, distance: Any = None
) -> list[Values]:
    """sums[r][p] += x[r, k] * w[p, k] for the k of one group."""
    group = GROUP_FORMATS[weight_format]
    for k, weights in enumerate(zip(*(group_weights(builder, group, panel) for panel in panels), strict=True)):
        if k < group.lines:
            ask_line(builder, panels, INT64(64 * k), distance)
        out = []
        for row, x in zip(sums, xs, strict=True):
            scalar = builder.load(builder.gep(x, [INT64(4 * k)], source_etype=BYTE), align=4, typ=ir.FloatType())
            lanes = splat_value(builder, scalar)
            out.append([multiply_add(builder, lanes, w, total) for w, total in zip(weights, row, strict=True)])
        sums = out
    return sums
