"""Activations in codes: groups along a row, each of whose numbers is a step times a signed integer.

    x = step * number        step = max |x| / limit of the group, number = round(x / step)

A group is its numbers, in words of 32 bits, then step and step * sum(number) as float32, and sum(number) as int32. With
n words a group, word i holds the numbers of k = i, n + i, 2 n + i, .. of the group, the first in the low bits. That is
the order in which a word of weights, masked place after place, shows their codes (see `groups`).

A group of zeros, or of numbers so small that their step would not be normal, is zeros. Where one of its numbers is NaN
or infinite, step is NaN, and so is every product with the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .emit import BYTE, Values, loop
from .isa import (
    FORMAT_NAMES,
    INT4_K_X8,
    INT4_X8,
    INT8_K_X16,
    INT8_LONG_X16,
    INT16_X16,
    SPREAD8,
    SPREAD16_K,
    SPREAD16_LONG,
)
from .memory import INT64, POINTER
from .vectors import (
    FLOATS,
    INTS,
    LANES,
    float_constant,
    int_constant,
    integer_lanes_sum,
    lanes_sum,
    larger,
    largest_lane,
    multiply_add,
    splat_value,
)

FLOAT = ir.FloatType()
ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
ROUND_BITS = 0x4B400000  # of ROUND; the bits of ROUND + n are these + n
SMALLEST = 1e-30  # of a group's largest number; its inverse times 32767 is finite


@dataclass(frozen=True, slots=True)
class CodeForm:
    """Groups of `size` numbers of `bits` bits, -limit .. limit."""

    size: int
    bits: int
    limit: float

    @property
    def words(self) -> int:
        return self.size * self.bits // 32

    @property
    def codes_bytes(self) -> int:
        return 4 * self.words

    @property
    def bytes(self) -> int:
        """One group."""
        return self.codes_bytes + 12


_WIDE, _SHORT, _BYTES = CodeForm(32, 16, 32767.0), CodeForm(16, 16, 32767.0), CodeForm(32, 8, 127.0)
_LONG = CodeForm(64, 16, 32767.0)
_FEWER_BITS = CodeForm(64, 16, 8191.0)  # 64 products with codes of 13 bits fit in 32
_FORMS = {
    INT8_K_X16: _SHORT,
    SPREAD16_K: _SHORT,
    INT4_X8: _BYTES,
    INT4_K_X8: _BYTES,
    SPREAD8: _BYTES,
    INT16_X16: _FEWER_BITS,
    INT8_LONG_X16: _LONG,
    SPREAD16_LONG: _LONG,
}


def form_of(read_as: int) -> CodeForm:
    """What a product of this format takes."""
    return _FORMS.get(read_as, _WIDE)


def encode_name(read_as: int) -> str:
    return f"encode_{FORMAT_NAMES[read_as]}"


def _magnitude(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(value, INTS), int_constant(0x7FFFFFFF)), FLOATS)


def _slice(builder: Any, vectors: Values, first: int, count: int) -> Any:
    """Lanes first .. first + count - 1 of vectors of 16, which must lie in one."""
    vector, lane = vectors[first // LANES], first % LANES
    order = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(lane, lane + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _words(builder: Any, form: CodeForm, numbers: Values, first: int) -> Any:
    """The low bits of numbers side by side in words, at most 16 words from `first` on."""
    count = min(form.words, LANES)
    kind = ir.VectorType(ir.IntType(32), count)
    words = ir.Constant(kind, [0] * count)
    for place in range(32 // form.bits):
        part = _slice(builder, numbers, place * form.words + first, count)
        part = builder.and_(part, ir.Constant(kind, [(1 << form.bits) - 1] * count))
        words = builder.or_(words, builder.shl(part, ir.Constant(kind, [form.bits * place] * count)))
    return words


def _encode_group(builder: Any, form: CodeForm, source: Any, target: Any) -> None:
    places = [builder.gep(source, [INT64(64 * i)], source_etype=BYTE) for i in range(form.size // LANES)]
    values = [builder.load(place, align=4, typ=FLOATS) for place in places]
    most, strange = float_constant(0.0), float_constant(0.0)
    for value in values:
        most = larger(builder, _magnitude(builder, value), most)
        strange = multiply_add(builder, value, float_constant(0.0), strange)
    largest, nothing = largest_lane(builder, most), lanes_sum(builder, strange)
    usable = builder.fcmp_ordered(">", largest, FLOAT(SMALLEST))
    inverse = builder.select(usable, builder.fdiv(FLOAT(form.limit), largest), FLOAT(0.0))
    step = builder.select(usable, builder.fdiv(largest, FLOAT(form.limit)), FLOAT(0.0))
    step = builder.fadd(step, nothing)
    factor = splat_value(builder, inverse)
    shifted = [multiply_add(builder, value, factor, float_constant(ROUND)) for value in values]
    counts = int_constant(0)
    for value in shifted:
        counts = builder.add(counts, builder.sub(builder.bitcast(value, INTS), int_constant(ROUND_BITS)))
    count = integer_lanes_sum(builder, counts)
    for first in range(0, form.words, LANES):
        words = _words(builder, form, [builder.bitcast(value, INTS) for value in shifted], first)
        builder.store(words, builder.gep(target, [INT64(4 * first)], source_etype=BYTE), align=4)
    tail = builder.gep(target, [INT64(form.codes_bytes)], source_etype=BYTE)
    builder.store(step, tail, align=4)
    tail = builder.gep(target, [INT64(form.codes_bytes + 4)], source_etype=BYTE)
    builder.store(builder.fmul(step, builder.sitofp(count, FLOAT)), tail, align=4)
    tail = builder.gep(target, [INT64(form.codes_bytes + 8)], source_etype=BYTE)
    builder.store(count, tail, align=4)


def emit_encode(module: ir.Module, read_as: int) -> None:
    """encode_FORMAT(x, x_stride, out, out_stride, rows, count): float32 rows as `count` groups each; strides: bytes."""
    form = form_of(read_as)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * 6), encode_name(read_as))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, x_stride, out, out_stride, rows, count = function.args

    def row(index: Any, current: Any) -> Values:
        source = builder.inttoptr(builder.add(x, builder.mul(index, x_stride)), POINTER)
        target = builder.inttoptr(builder.add(out, builder.mul(index, out_stride)), POINTER)

        def group(number: Any, current: Any) -> Values:
            at = builder.gep(source, [builder.mul(number, INT64(4 * form.size))], source_etype=BYTE)
            to = builder.gep(target, [builder.mul(number, INT64(form.bytes))], source_etype=BYTE)
            _encode_group(builder, form, at, to)
            return []

        loop(builder, count, [], group)
        return []

    loop(builder, rows, [], row)
    builder.ret_void()
