"""From panels as they are held to panels that tall tiles read, for as many rows as make that worth it.

A tile unpacks what it reads for its own few rows. Many rows pass a panel that was unpacked once, to float32, or, where
activations are in codes, to codes of the same width with their scales in float32. The numbers are those that the tile
itself would compute, so the sums have the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .activations import CodeForm, form_of
from .emit import BYTE, Values, loop
from .group_steps import group_scales, group_weights
from .groups import GroupFormat, group_of
from .integer_steps import code_places, constant, halves
from .isa import BFLOAT16, FLOAT32, FORMAT_NAMES
from .memory import INT64, POINTER
from .steps import bfloat16_pair
from .vectors import LANES


def unpack_name(read_as: int, unpacked: int) -> str:
    return f"unpack_{FORMAT_NAMES[read_as]}_to_{FORMAT_NAMES[unpacked]}"


def emit_unpack(module: ir.Module, read_as: int, unpacked: int) -> None:
    """unpack_FORMAT_to_FORMAT(panel, out, steps): `steps` steps (of a tile over k) of a panel."""
    kind = ir.FunctionType(ir.VoidType(), [INT64] * 3)
    function = ir.Function(module, kind, unpack_name(read_as, unpacked))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    panel, out, steps = function.args
    emit, size, unpacked_size = _emitter(read_as, unpacked)

    def body(index: Any, current: Any) -> Values:
        source = builder.inttoptr(builder.add(panel, builder.mul(index, INT64(size))), POINTER)
        target = builder.inttoptr(builder.add(out, builder.mul(index, INT64(unpacked_size))), POINTER)
        emit(builder, source, target)
        return []

    loop(builder, steps, [], body)
    builder.ret_void()


def _emitter(read_as: int, unpacked: int) -> tuple[Any, int, int]:
    """What unpacks one step, and the bytes of a step before and after."""
    if read_as == BFLOAT16:
        return _pair_to_floats, 64, 128
    if unpacked == FLOAT32:
        group = group_of(read_as)
        return lambda b, source, target: _group_to_floats(b, group, source, target), group.bytes, 64 * group.size
    group, spread, form = group_of(read_as), group_of(unpacked), form_of(read_as)
    return lambda b, source, target: _spread(b, group, spread, form, source, target), group.bytes, spread.bytes


def _at(builder: Any, pointer: Any, offset: int) -> Any:
    return builder.gep(pointer, [INT64(offset)], source_etype=BYTE)


def _pair_to_floats(builder: Any, source: Any, target: Any) -> None:
    for number, weights in enumerate(bfloat16_pair(builder, source)):
        builder.store(weights, _at(builder, target, 64 * number), align=4)


def _group_to_floats(builder: Any, group: GroupFormat, source: Any, target: Any) -> None:
    for k, weights in enumerate(group_weights(builder, group, source)):
        builder.store(weights, _at(builder, target, 64 * k), align=4)


def _spread(builder: Any, group: GroupFormat, spread: GroupFormat, form: CodeForm, source: Any, target: Any) -> None:
    """Word i of place p goes to word p * words + i: where the activations have the numbers that it is multiplied by."""
    for word in range(group.words):
        raw = builder.load(_at(builder, source, 64 * word), align=4, typ=halves(LANES))
        for place, codes in enumerate(code_places(builder, group, form, raw, LANES)):
            if spread.is_signed:
                codes = builder.sub(codes, constant(halves(LANES), group.zero))
            builder.store(codes, _at(builder, target, 64 * (place * group.words + word)), align=4)
    for number, scales in enumerate(group_scales(builder, group, source)):
        if scales is not None:
            builder.store(scales, _at(builder, target, spread.codes_bytes + number * spread.scale_bytes), align=4)
